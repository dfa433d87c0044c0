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
    // Nanoseconds until two threads have seen what each other wrote, the mean of a few times; of more threads, which wait for more, in proportion. 0 where a thread does not come within
    // a moment, or there is but one. It takes some microseconds.
    double exchange();

  private:
    void stop();
    // What one thread writes lies in one line: each that travels costs as much as a small task.
    struct alignas(64) Part {
        std::atomic<uint64_t> tasks{0};     // epoch << 40 | first task << 20 | end; of the job before: nobody has taken any yet
        std::atomic<uint64_t> finished{0};  // tasks, ever
    };

    struct alignas(64) Meeting {
        std::atomic<uint64_t> times{0};  // that this thread has come, ever
    };

    void work(int thread);
    void work_on(uint64_t job, int thread);
    bool claim(uint64_t job, int part, bool own, int &task);
    void run_at_once(int count, Task task, void *context);

    std::vector<std::thread> workers_;
    std::vector<Part> parts_;              // one a thread
    std::vector<Meeting> meetings_;        // one a thread
    alignas(64) std::atomic<uint64_t> job_{0};  // epoch << 20 | tasks; what idle threads watch
    Task task_ = nullptr;
    void *context_ = nullptr;
    std::atomic<bool> stopping_{false};
};

}  // namespace qforge
