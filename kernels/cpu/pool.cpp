// The thread pool of pool.h.
#include "qforge/pool.h"

#include <algorithm>

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
constexpr uint64_t kField = (1u << 20) - 1;

uint32_t epoch_of(uint64_t tasks) { return static_cast<uint32_t>(tasks >> 40); }
uint64_t first_of(uint64_t tasks) { return tasks >> 20 & kField; }
uint64_t end_of(uint64_t tasks) { return tasks & kField; }

}  // namespace

Pool::Pool(int threads) : ranges_(static_cast<size_t>(threads)) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto &w : workers_) w.join();
}

// Takes one task of job `epoch` from a range: the first of one's own, the last of another's.
bool Pool::claim(uint32_t epoch, Range &range, bool own, int &task) {
    uint64_t tasks = range.tasks.load(std::memory_order_acquire);
    do {
        if (epoch_of(tasks) != epoch || first_of(tasks) >= end_of(tasks)) return false;
        task = static_cast<int>(own ? first_of(tasks) : end_of(tasks) - 1);
    } while (!range.tasks.compare_exchange_weak(tasks, own ? tasks + (1u << 20) : tasks - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    return true;
}

// A successful claim keeps the job alive until its task is counted as done, so task_ and context_ are read after it.
void Pool::work_on(uint32_t epoch, int thread) {
    const int all = threads();
    for (int i = 0; i < all; ++i) {
        Range &range = ranges_[static_cast<size_t>((thread + i) % all)];
        for (int task; claim(epoch, range, i == 0, task);) {
            task_(context_, task, thread);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }
}

void Pool::run(int count, Task task, void *context) {
    if (workers_.empty() || count <= 1) {
        for (int i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    constexpr int kMost = 1 << 19;
    for (int first = 0; first < count; first += kMost) {  // the counter has 20 bits; more tasks than that never happen in practice, but stay right
        struct Shifted {
            Task task;
            void *context;
            int first;
        } shifted{task, context, first};
        task_ = [](void *c, int i, int thread) {
            auto *s = static_cast<Shifted *>(c);
            s->task(s->context, s->first + i, thread);
        };
        context_ = &shifted;
        const int here = std::min(count - first, kMost);
        pending_.store(here, std::memory_order_relaxed);
        const uint32_t epoch = (epoch_of(ranges_[0].tasks.load(std::memory_order_relaxed)) + 1) & 0xFFFFFF;
        const auto share = [&](size_t thread) { return static_cast<uint64_t>(here) * thread / ranges_.size(); };
        for (size_t t = 0; t < ranges_.size(); ++t) ranges_[t].tasks.store(static_cast<uint64_t>(epoch) << 40 | share(t) << 20 | share(t + 1), std::memory_order_release);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        work_on(epoch, 0);
        for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < kSpins)
                QFORGE_PAUSE();
            else
                std::this_thread::yield();
        }
    }
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    while (true) {
        uint32_t now = epoch_.load(std::memory_order_acquire);
        for (int spins = 0; now == seen && spins < kSpins; ++spins) {
            QFORGE_PAUSE();
            now = epoch_.load(std::memory_order_acquire);
        }
        if (now == seen) {
            epoch_.wait(seen, std::memory_order_acquire);
            continue;
        }
        seen = now;
        if (stopping_.load()) return;
        work_on(epoch_of(ranges_[static_cast<size_t>(thread)].tasks.load(std::memory_order_acquire)), thread);
    }
}

}  // namespace qforge
