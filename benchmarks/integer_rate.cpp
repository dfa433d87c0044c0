// How many integer multiplications a second this CPU can do at most: nothing but one instruction that multiplies bytes, on registers, on all threads at once.
//     integer_rate THREADS INSTRUCTION        amx, avx512-vnni, avx-vnni, avx2; prints one number, the best of many short runs
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr int kPasses = 100000, kRuns = 200;
using Pass = void (*)();

// Twelve sums, which hide how long one takes; AVX2 has no sum, and its products go to registers that nobody reads
#define TWELVE(f) f("0") f("1") f("2") f("3") f("4") f("5") f("6") f("7") f("8") f("9") f("10") f("11")
#define ZMM(n) "vpdpbusd %%zmm14, %%zmm15, %%zmm" n "\n"
#define YMM(n) "%{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm" n "\n"
#define AVX2(n) "vpmaddubsw %%ymm14, %%ymm15, %%ymm" n "\n"
#define CLOBBERED "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"

void avx512_vnni() { for (int i = 0; i < kPasses; ++i) asm volatile(TWELVE(ZMM)::: CLOBBERED); }
void avx_vnni() { for (int i = 0; i < kPasses; ++i) asm volatile(TWELVE(YMM)::: CLOBBERED); }
void avx2() { for (int i = 0; i < kPasses; ++i) asm volatile(TWELVE(AVX2)::: CLOBBERED); }
void amx() {  // 16 x 16 results over 64 bytes, to four tiles
    alignas(64) struct { uint8_t palette = 1, start = 0, reserved[14] = {}; uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64}; uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16}; } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
    for (int i = 0; i < kPasses; ++i) asm volatile("tdpbssd %tmm6, %tmm5, %tmm0\ntdpbssd %tmm7, %tmm5, %tmm1\ntdpbssd %tmm6, %tmm4, %tmm2\ntdpbssd %tmm7, %tmm4, %tmm3\n");
    asm volatile("tilerelease");
}

struct Kind {
    const char *name;
    Pass pass;
    double multiplications;  // of a pass
};
constexpr Kind kKinds[] = {{"amx", amx, 4.0 * 16 * 16 * 64}, {"avx512-vnni", avx512_vnni, 12.0 * 64}, {"avx-vnni", avx_vnni, 12.0 * 32}, {"avx2", avx2, 12.0 * 32}};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int main(int count, char **given) {
    if (count != 3) return 2;
    const int threads = std::atoi(given[1]);
    const auto kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind &k) { return k.name == std::string(given[2]); });
    if (kind == std::end(kKinds) || threads < 1) return 2;
    if (kind->pass == amx && syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 1;
    std::vector<double> begun(static_cast<size_t>(threads) * kRuns), ended(begun.size());  // [run][thread]
    std::vector<std::thread> all;
    std::atomic<int> ready{0};
    for (int thread = 0; thread < threads; ++thread)
        all.emplace_back([&, thread] {
            for (int run = 0; run < kRuns; ++run) {
                ++ready;
                while (ready < threads * (run + 1)) {}  // all at once
                const size_t at = static_cast<size_t>(run) * static_cast<size_t>(threads) + static_cast<size_t>(thread);
                begun[at] = seconds();
                kind->pass();
                ended[at] = seconds();
            }
        });
    for (auto &t : all) t.join();
    double best = 0;
    for (int run = 0; run < kRuns; ++run) {
        const auto first = run * threads, end = first + threads;  // from the first that began to the last that ended: one that was late counts
        const double took = *std::max_element(ended.begin() + first, ended.begin() + end) - *std::min_element(begun.begin() + first, begun.begin() + end);
        best = std::max(best, threads * kPasses * kind->multiplications / took);
    }
    std::printf("%.4e\n", best);
}
