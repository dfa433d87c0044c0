// add_products of products.h: tiles of 32 x 32 sums, 8 rows of a tile in registers at once, over 256 tokens whose panels stay in the caches.
#include "qforge/products.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define QFORGE_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#endif

namespace qforge {

#ifdef QFORGE_BF16
namespace {

constexpr int64_t kTokens = 256;           // packed together: a panel is 16 KB, so that two of them lie in the first-level cache
constexpr int64_t kPairs = kTokens / 2;    // an element of a panel is two tokens of one column, as the instruction takes them
constexpr int64_t kPanel = kPairs * kTile;  // elements
constexpr int kRows = 8;                   // 8 rows x 2 vectors: 16 sums in flight

struct Job {
    const float *left, *right;
    int64_t tokens, width, panels, first;  // `first` token of the chunk
    bool lower;
    uint32_t *packed_left, *packed_right;
    float *into;
};

// 16 columns of one row as bf16, zero-extended to 32 bits; zeros where there is no such row or column.
QFORGE_BF16 __m512i row_of(const float *x, const Job &job, int64_t token, int64_t column) {
    const int64_t live = std::clamp<int64_t>(job.width - column, 0, 16);
    if (token >= job.tokens || live == 0) return _mm512_setzero_si512();
    const __mmask16 mask = static_cast<__mmask16>((1u << live) - 1);
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + token * job.width + column));
    return _mm512_cvtepu16_epi32(reinterpret_cast<const __m256i &>(rounded));
}

QFORGE_BF16 void pack(const float *x, const Job &job, int64_t panel, uint32_t *into) {
    for (int64_t pair = 0; pair < kPairs; ++pair)
        for (int64_t half = 0; half < kTile; half += 16) {
            const int64_t token = job.first + 2 * pair, column = panel * kTile + half;
            const __m512i even = row_of(x, job, token, column), odd = row_of(x, job, token + 1, column);
            _mm512_store_si512(into + pair * kTile + half, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

// into: [kTile, kTile] sums of this chunk.
QFORGE_BF16 void multiply(const uint32_t *left, const uint32_t *right, float *into) {
    for (int64_t first = 0; first < kTile; first += kRows) {
        __m512 sums[kRows][2];
        for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < kPairs; ++pair) {
            const uint32_t *row = right + pair * kTile, *column = left + pair * kTile + first;
            const __m512i near = _mm512_load_si512(row), far = _mm512_load_si512(row + 16);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m512i factor = _mm512_set1_epi32(static_cast<int>(column[r]));
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], reinterpret_cast<const __m512bh &>(factor), reinterpret_cast<const __m512bh &>(near));
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], reinterpret_cast<const __m512bh &>(factor), reinterpret_cast<const __m512bh &>(far));
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(into + (first + r) * kTile + 16 * half, sums[r][half]);
    }
}

QFORGE_BF16 void add_row_of_tiles(const Job &job, int64_t i) {
    alignas(64) float sums[kTile * kTile];
    const int64_t rows = std::min(kTile, job.width - i * kTile);
    for (int64_t j = 0; j < (job.lower ? i + 1 : job.panels); ++j) {
        multiply(job.packed_left + i * kPanel, job.packed_right + j * kPanel, sums);
        const int64_t columns = std::min(kTile, job.width - j * kTile);
        for (int64_t r = 0; r < rows; ++r) {
            float *into = job.into + (i * kTile + r) * job.width + j * kTile;
            for (int64_t c = 0; c < columns; ++c) into[c] += sums[r * kTile + c];
        }
    }
}

struct Free {
    void operator()(void *p) const { std::free(p); }
};
using Packed = std::unique_ptr<uint32_t, Free>;

Packed allocate(int64_t panels) { return Packed(static_cast<uint32_t *>(std::aligned_alloc(64, panels * kPanel * sizeof(uint32_t)))); }

}  // namespace

bool has_bf16_products() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }

void add_products(Pool &pool, const float *left, const float *right, int64_t tokens, int64_t width, bool lower, float *into) {
    const int64_t panels = (width + kTile - 1) / kTile;
    const bool same = left == right;
    const Packed packed_left = allocate(panels), packed_right = same ? nullptr : allocate(panels);
    Job job{left, right, tokens, width, panels, 0, lower, packed_left.get(), same ? packed_left.get() : packed_right.get(), into};
    for (; job.first < tokens; job.first += kTokens) {
        pool.run(
            static_cast<int>(same ? panels : 2 * panels),
            [](void *context, int task, int) {
                const Job &job = *static_cast<Job *>(context);
                const int64_t panel = task % job.panels;
                if (task < job.panels)
                    pack(job.left, job, panel, job.packed_left + panel * kPanel);
                else
                    pack(job.right, job, panel, job.packed_right + panel * kPanel);
            },
            &job);
        pool.run(
            static_cast<int>(panels), [](void *context, int task, int) { add_row_of_tiles(*static_cast<Job *>(context), static_cast<Job *>(context)->panels - 1 - task); }, &job);
    }
}

#else

bool has_bf16_products() { return false; }
void add_products(Pool &, const float *, const float *, int64_t, int64_t, bool, float *) { std::abort(); }

#endif

}  // namespace qforge
