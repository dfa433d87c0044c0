// The thread pool of pool.h.
#include "qforge/pool.h"

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

uint32_t epoch_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 40); }

}  // namespace

Pool::Pool(int threads) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto &w : workers_) w.join();
}

// Takes one task of job `epoch`. A successful exchange keeps the job alive until this task is counted as done, so task_ and context_ are read after it.
bool Pool::claim_and_run(uint32_t epoch, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
        if (epoch_of(ticket) != epoch || ((ticket >> 20) & kField) >= (ticket & kField)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + (1u << 20), std::memory_order_acq_rel, std::memory_order_acquire));
    task_(context_, static_cast<int>((ticket >> 20) & kField), thread);
    pending_.fetch_sub(1, std::memory_order_release);
    return true;
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
        const int here = count - first < kMost ? count - first : kMost;
        pending_.store(here, std::memory_order_relaxed);
        const uint32_t epoch = (epoch_of(ticket_.load(std::memory_order_relaxed)) + 1) & 0xFFFFFF;
        ticket_.store(static_cast<uint64_t>(epoch) << 40 | static_cast<uint64_t>(here), std::memory_order_release);
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
        while (claim_and_run(epoch, 0)) {
        }
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
        const uint32_t job = epoch_of(ticket_.load(std::memory_order_acquire));
        while (claim_and_run(job, thread)) {
        }
    }
}

}  // namespace qforge
