// Jobs of random sizes, one after the other, on a pool of 2 to 8 threads: each task runs once, and a job ends when all of its tasks did; exchanges between them.   pool_check FIRST_SEED COUNT
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "qforge/pool.h"
#include "seeds.h"

using namespace qforge;

namespace {

struct Job {
    std::vector<std::atomic<int>> runs;
    std::vector<int> threads;  // that ran a task
    int slow;                  // a task that takes longer than its thread's others
};

bool once(Pool &pool, unsigned seed, int number, int count, int slow) {
    Job job{std::vector<std::atomic<int>>(static_cast<size_t>(count)), std::vector<int>(static_cast<size_t>(count), -1), slow};
    pool.run(
        count,
        [](void *context, int task, int thread) {
            auto &j = *static_cast<Job *>(context);
            if (task == j.slow) std::this_thread::sleep_for(std::chrono::microseconds(200));
            j.threads[static_cast<size_t>(task)] = thread;  // a plain write: run() has to make it visible
            j.runs[static_cast<size_t>(task)].fetch_add(1, std::memory_order_relaxed);
        },
        &job);
    for (int i = 0; i < count; ++i) {
        const int runs = job.runs[static_cast<size_t>(i)].load(std::memory_order_relaxed), thread = job.threads[static_cast<size_t>(i)];
        if (runs == 1 && thread >= 0 && thread < pool.threads()) continue;
        std::printf("seed %u, %d threads, job %d: task %d of %d ran %d times, at last by thread %d\n", seed, pool.threads(), number, i, count, runs, thread);
        return false;
    }
    return true;
}

bool same(unsigned seed) {
    std::mt19937 random(seed);
    Pool pool(2 + static_cast<int>(random() % 7));
    for (int number = 0; number < 400; ++number) {
        const int count = static_cast<int>(random() % (number % 8 ? 40 : 400));
        if (number % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // until threads sleep
        if (number % 10 == 7) {
            const double took = pool.exchange();
            if (took < 0 || took > 1e9) {
                std::printf("seed %u, %d threads, job %d: an exchange of %g ns\n", seed, pool.threads(), number, took);
                return false;
            }
        }
        if (!once(pool, seed, number, count, random() % 16 || count == 0 ? -1 : static_cast<int>(random() % static_cast<unsigned>(count)))) return false;
    }
    return seed > 0 || once(pool, seed, 400, (1 << 20) + 5, -1);  // more than fit one job
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
