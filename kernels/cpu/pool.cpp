// The thread pool of pool.h.
#include "qforge/pool.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define QFORGE_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define QFORGE_PAUSE() asm volatile("yield")
#else
#define QFORGE_PAUSE() ((void)0)
#endif

namespace qforge {
namespace {

constexpr int kSpins = 4000;  // about 50 us: longer than the gap between two linears of one layer, shorter than a scheduler's time slice
constexpr int kBits = 20;     // of a number of tasks
constexpr uint64_t kField = (1u << kBits) - 1, kEpochs = (1u << 24) - 1;

uint64_t epoch_of_job(uint64_t job) { return job >> kBits; }
uint64_t epoch_of(uint64_t tasks) { return tasks >> 2 * kBits; }
uint64_t first_of(uint64_t tasks) { return tasks >> kBits & kField; }
uint64_t end_of(uint64_t tasks) { return tasks & kField; }
uint64_t packed(uint64_t epoch, uint64_t first, uint64_t end) { return epoch << 2 * kBits | first << kBits | end; }
uint64_t after(uint64_t epoch) { return (epoch + 1) & kEpochs; }
uint64_t share(uint64_t count, size_t part, size_t parts) { return count * part / parts; }  // where a part's tasks begin

}  // namespace

Pool::Pool(int threads) : parts_(static_cast<size_t>(threads)), meetings_(static_cast<size_t>(threads)) {
    try {
        for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
    } catch (...) {  // no more threads are to be had
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    stopping_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (auto &w : workers_) w.join();
}

// Takes a task of a part: the first of one's own, the last of another's. Whoever comes first finds what the job before has left there, and begins.
bool Pool::claim(uint64_t job, int part, bool own, int &task) {
    const uint64_t epoch = epoch_of_job(job), count = job & kField;
    const auto p = static_cast<size_t>(part);
    std::atomic<uint64_t> &tasks = parts_[p].tasks;
    uint64_t found = tasks.load(std::memory_order_acquire), first, end;
    do {
        const bool begun = epoch_of(found) == epoch;
        if (!begun && after(epoch_of(found)) != epoch) return false;  // the job is over
        first = begun ? first_of(found) : share(count, p, parts_.size());
        end = begun ? end_of(found) : share(count, p + 1, parts_.size());
        if (first >= end) return false;
        task = static_cast<int>(own ? first++ : --end);
    } while (!tasks.compare_exchange_weak(found, packed(epoch, first, end), std::memory_order_acq_rel, std::memory_order_acquire));
    return true;
}

// A successful claim keeps the job alive until its task is counted as finished, so task_ and context_ are read after it.
void Pool::work_on(uint64_t job, int thread) {
    const int all = threads();
    std::atomic<uint64_t> &finished = parts_[static_cast<size_t>(thread)].finished;
    for (int i = 0; i < all; ++i)
        for (int task; claim(job, (thread + i) % all, i == 0, task);) {
            task_(context_, task, thread);
            finished.store(finished.load(std::memory_order_relaxed) + 1, std::memory_order_release);
        }
}

void Pool::run(int count, Task task, void *context) {
    if (workers_.empty() || count <= 1) {
        for (int i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    if (count <= static_cast<int>(kField)) return run_at_once(count, task, context);
    for (int first = 0; first < count; first += kField) {  // so many tasks never happen in practice, but stay right
        struct Shifted {
            Task task;
            void *context;
            int first;
        } shifted{task, context, first};
        const auto run_shifted = [](void *c, int i, int thread) {
            auto *s = static_cast<Shifted *>(c);
            s->task(s->context, s->first + i, thread);
        };
        run_at_once(std::min(count - first, static_cast<int>(kField)), run_shifted, &shifted);
    }
}

void Pool::run_at_once(int count, Task task, void *context) {
    const auto finished = [this] {
        uint64_t sum = 0;
        for (const Part &p : parts_) sum += p.finished.load(std::memory_order_acquire);
        return sum;
    };
    const auto tasks = static_cast<uint64_t>(count);
    const uint64_t last = finished() + tasks, epoch = after(epoch_of_job(job_.load(std::memory_order_relaxed)));
    task_ = task;
    context_ = context;
    if (count < threads())  // a part without tasks is begun by nobody
        for (size_t p = 0; p < parts_.size(); ++p) parts_[p].tasks.store(packed(epoch, share(tasks, p, parts_.size()), share(tasks, p + 1, parts_.size())), std::memory_order_release);
    const uint64_t job = epoch << kBits | tasks;
    job_.store(job, std::memory_order_release);
    job_.notify_all();
    work_on(job, 0);
    for (int spins = 0; finished() != last; ++spins) {
        if (spins < kSpins)
            QFORGE_PAUSE();
        else
            std::this_thread::yield();
    }
}

double Pool::exchange() {
    constexpr uint64_t kTimes = 8;
    constexpr int kPatience = 1000;  // spins, some 10 us: longer than the hand-over of a job, shorter than what a thread that has no core takes to get one
    struct Job {
        Pool *pool;
        uint64_t before;
        std::atomic<bool> missed{false};
        double nanoseconds = 0;
    } job{this, meetings_[0].times.load()};
    const auto meet = [](void *context, int task, int) {
        auto &j = *static_cast<Job *>(context);
        std::vector<Meeting> &all = j.pool->meetings_;
        std::chrono::steady_clock::time_point start;
        for (uint64_t i = 0; i <= kTimes; ++i) {  // the first time is for all to come
            if (i == 1) start = std::chrono::steady_clock::now();
            all[static_cast<size_t>(task)].times.store(j.before + i + 1, std::memory_order_release);
            for (const Meeting &other : all)
                for (int spins = 0; other.times.load(std::memory_order_acquire) < j.before + i + 1; ++spins) {
                    if (spins == kPatience) j.missed.store(true, std::memory_order_relaxed);
                    if (j.missed.load(std::memory_order_relaxed)) return;
                    QFORGE_PAUSE();
                }
        }
        if (task == 0) j.nanoseconds = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kTimes * 2 / static_cast<double>(all.size());
    };
    if (threads() > 1) run(threads(), meet, &job);
    for (Meeting &m : meetings_) m.times.store(job.before + kTimes + 1, std::memory_order_relaxed);  // of who gave up
    return job.nanoseconds;
}

void Pool::work(int thread) {
    uint64_t seen = 0;
    while (true) {
        uint64_t now = job_.load(std::memory_order_acquire);
        for (int spins = 0; now == seen && spins < kSpins; ++spins) {
            QFORGE_PAUSE();
            now = job_.load(std::memory_order_acquire);
        }
        if (now == seen) {
            job_.wait(seen, std::memory_order_acquire);
            continue;
        }
        seen = now;
        if (stopping_.load()) return;
        work_on(now, thread);
    }
}

}  // namespace qforge
