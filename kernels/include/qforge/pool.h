// Threads that share out numbered tasks. Each begins with a range of its own, so that it reads memory as one stream, and then takes from the ends of the others' ranges:
// a static split waits for the slowest thread, here a thread that loses its core to another process delays one task only. Idle threads spin for a moment and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace qforge {

class Pool {
  public:
    using Task = void (*)(void *context, int task, int thread);

    explicit Pool(int threads);  // `threads` counts the caller; 1 starts none
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    // Calls task(context, i, thread) once for every i in [0, count) and returns when all are done. One caller at a time.
    void run(int count, Task task, void *context);
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

  private:
    struct alignas(64) Range {
        std::atomic<uint64_t> tasks{0};  // epoch << 40 | first task << 20 | end
    };

    void work(int thread);
    void work_on(uint32_t epoch, int thread);
    bool claim(uint32_t epoch, Range &range, bool own, int &task);

    std::vector<std::thread> workers_;
    std::vector<Range> ranges_;       // one a thread
    std::atomic<uint32_t> epoch_{0};  // what idle threads sleep on
    std::atomic<int> pending_{0};
    std::atomic<bool> stopping_{false};
    Task task_ = nullptr;
    void *context_ = nullptr;
};

}  // namespace qforge
