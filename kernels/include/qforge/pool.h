// Threads that share out numbered tasks: an atomic counter hands them out, idle threads spin for a moment and then sleep.
// A static split waits for the slowest thread; with a counter, a thread that loses its core to another process delays one task only.
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
    void work(int thread);
    bool claim_and_run(uint32_t epoch, int thread);

    std::vector<std::thread> workers_;
    std::atomic<uint64_t> ticket_{0};   // epoch << 40 | next task << 20 | number of tasks
    std::atomic<uint32_t> epoch_{0};    // what idle threads sleep on
    std::atomic<int> pending_{0};
    std::atomic<bool> stopping_{false};
    Task task_ = nullptr;
    void *context_ = nullptr;
};

}  // namespace qforge
