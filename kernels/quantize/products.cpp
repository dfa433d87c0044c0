// products.h. Tiles of 32 columns, 8 rows of a tile in registers at once; add_products goes over 256 tokens whose panels stay in the caches.
#include "qforge/products.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

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
constexpr int64_t kBlock = 64, kStrip = 16;  // tokens and panels of one task of `multiply`

struct Matrix {
    const float *values;
    int64_t rows, columns;
};

struct Job {
    Matrix left, right;
    int64_t left_panels, right_panels, first;  // `first` token of the chunk
    bool lower;
    uint32_t *packed_left, *packed_right;
    float *into;
};

int64_t panels_of(int64_t columns) { return (columns + kTile - 1) / kTile; }

__mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, 16)) - 1); }

// 16 columns of one row as bf16, zero-extended to 32 bits; zeros where there is no such row or column.
QFORGE_BF16 __m512i row_of(const Matrix &m, int64_t row, int64_t column) {
    if (row >= m.rows || column >= m.columns) return _mm512_setzero_si512();
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(m.columns - column), m.values + row * m.columns + column));
    return _mm512_cvtepu16_epi32(reinterpret_cast<const __m256i &>(rounded));
}

// Columns of a panel, 256 rows 2 by 2 from `first` on.
QFORGE_BF16 void pack_columns(const Matrix &m, int64_t first, int64_t panel, uint32_t *into) {
    for (int64_t pair = 0; pair < kPairs; ++pair)
        for (int64_t half = 0; half < kTile; half += 16) {
            const int64_t row = first + 2 * pair, column = panel * kTile + half;
            const __m512i even = row_of(m, row, column), odd = row_of(m, row + 1, column);
            _mm512_store_si512(into + pair * kTile + half, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

// 32 columns of one row as 16 pairs of bf16; zeros where there is no such row or column.
QFORGE_BF16 __m512i pairs_of(const Matrix &m, int64_t row, int64_t column) {
    if (row >= m.rows || column >= m.columns) return _mm512_setzero_si512();
    const float *x = m.values + row * m.columns + column;
    const int64_t live = m.columns - column;
    const __m512bh rounded = _mm512_cvtne2ps_pbh(live > 16 ? _mm512_maskz_loadu_ps(first_lanes(live - 16), x + 16) : _mm512_setzero_ps(), _mm512_maskz_loadu_ps(first_lanes(live), x));
    return reinterpret_cast<const __m512i &>(rounded);
}

QFORGE_BF16 void transpose(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // r[i + j]: column j of each quarter, of rows i to i + 3
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44), low2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xEE), high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xEE);
        t[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(low, low2, 0xDD);
        t[8 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Rows of a panel, columns 2 by 2.
QFORGE_BF16 void pack_rows(const Matrix &m, int64_t pairs, int64_t panel, uint32_t *into) {
    for (int64_t first = 0; first < pairs; first += 16)
        for (int64_t half = 0; half < kTile; half += 16) {
            __m512i block[16];
#pragma GCC unroll 16
            for (int r = 0; r < 16; ++r) block[r] = pairs_of(m, panel * kTile + half + r, 2 * first);
            transpose(block);
            for (int64_t pair = 0; pair < std::min<int64_t>(16, pairs - first); ++pair) _mm512_store_si512(into + (first + pair) * kTile + half, block[pair]);
        }
}

// into: [kTile, kTile] sums of this chunk.
QFORGE_BF16 void multiply_panels(const uint32_t *left, const uint32_t *right, float *into) {
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
    const int64_t width = job.right.columns, rows = std::min(kTile, job.left.columns - i * kTile);
    for (int64_t j = 0; j < (job.lower ? i + 1 : job.right_panels); ++j) {
        multiply_panels(job.packed_left + i * kPanel, job.packed_right + j * kPanel, sums);
        const int64_t columns = std::min(kTile, width - j * kTile);
        for (int64_t r = 0; r < rows; ++r) {
            float *into = job.into + (i * kTile + r) * width + j * kTile;
            for (int64_t c = 0; c < columns; ++c) into[c] += sums[r * kTile + c];
        }
    }
}

// 8 rows of pairs [8, pairs] times a panel: `rows` x `columns` of them into y.
QFORGE_BF16 void multiply_rows(const uint32_t *x, const uint32_t *panel, int64_t pairs, int64_t rows, int64_t columns, float *y, int64_t y_stride) {
    __m512 sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const __m512i near = _mm512_load_si512(panel + pair * kTile), far = _mm512_load_si512(panel + pair * kTile + 16);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512i factor = _mm512_set1_epi32(static_cast<int>(x[r * pairs + pair]));
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], reinterpret_cast<const __m512bh &>(factor), reinterpret_cast<const __m512bh &>(near));
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], reinterpret_cast<const __m512bh &>(factor), reinterpret_cast<const __m512bh &>(far));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
        if (r < rows)
            for (int half = 0; half < 2; ++half) _mm512_mask_storeu_ps(y + r * y_stride + 16 * half, first_lanes(columns - 16 * half), sums[r][half]);
}

QFORGE_BF16 void round_rows(const Matrix &x, int64_t first, int64_t rows, int64_t pairs, uint32_t *into) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t p = 0; p < pairs; p += 16) _mm512_mask_storeu_epi32(into + r * pairs + p, first_lanes(pairs - p), pairs_of(x, first + r, 2 * p));
}

struct Free {
    void operator()(void *p) const { std::free(p); }
};
using Packed = std::unique_ptr<uint32_t, Free>;

Packed allocate(int64_t words) {
    Packed room(static_cast<uint32_t *>(std::aligned_alloc(64, static_cast<size_t>(words) * sizeof(uint32_t))));
    if (!room) throw std::bad_alloc();
    return room;
}

}  // namespace

bool has_bf16_tiles() { return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16"); }

bool has_bf16_products() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"); }

void add_products(Pool &pool, const float *left, const float *right, int64_t tokens, int64_t left_width, int64_t right_width, bool lower, float *into) {
    const int64_t left_panels = panels_of(left_width), right_panels = panels_of(right_width);
    const bool same = left == right && left_width == right_width;
    const Packed packed_left = allocate(left_panels * kPanel), packed_right = same ? nullptr : allocate(right_panels * kPanel);
    Job job{{left, tokens, left_width}, {right, tokens, right_width}, left_panels, right_panels, 0, lower, packed_left.get(), same ? packed_left.get() : packed_right.get(), into};
    for (; job.first < tokens; job.first += kTokens) {
        pool.run(
            static_cast<int>(same ? left_panels : left_panels + right_panels),
            [](void *context, int task, int) {
                const Job &job = *static_cast<Job *>(context);
                if (task < job.left_panels)
                    pack_columns(job.left, job.first, task, job.packed_left + task * kPanel);
                else
                    pack_columns(job.right, job.first, task - job.left_panels, job.packed_right + (task - job.left_panels) * kPanel);
            },
            &job);
        pool.run(
            static_cast<int>(left_panels), [](void *context, int task, int) { add_row_of_tiles(*static_cast<Job *>(context), static_cast<Job *>(context)->left_panels - 1 - task); }, &job);
    }
}

void multiply(Pool &pool, const float *x, int64_t tokens, int64_t inputs, const float *weight, int64_t outputs, float *y) {
    const int64_t pairs = (inputs + 1) / 2, panels = panels_of(outputs);
    const Packed packed = allocate(panels * pairs * kTile);
    struct Product {
        Matrix x, weight;
        int64_t pairs, panels, strips;
        uint32_t *packed;
        float *y;
    } product{{x, tokens, inputs}, {weight, outputs, inputs}, pairs, panels, (panels + kStrip - 1) / kStrip, packed.get(), y};
    pool.run(
        static_cast<int>(panels),
        [](void *context, int panel, int) {
            const auto &p = *static_cast<Product *>(context);
            pack_rows(p.weight, p.pairs, panel, p.packed + panel * p.pairs * kTile);
        },
        &product);
    pool.run(
        static_cast<int>((tokens + kBlock - 1) / kBlock * product.strips),
        [](void *context, int task, int) {
            const auto &p = *static_cast<Product *>(context);
            const int64_t first = task / p.strips * kBlock, strip = task % p.strips * kStrip, outputs = p.weight.rows;
            thread_local std::vector<uint32_t> rounded;
            rounded.resize(static_cast<size_t>(kBlock * p.pairs));
            const int64_t rows = std::min(kBlock, p.x.rows - first), whole = (rows + kRows - 1) / kRows * kRows;
            round_rows(p.x, first, whole, p.pairs, rounded.data());
            for (int64_t panel = strip; panel < std::min(strip + kStrip, p.panels); ++panel)
                for (int64_t r = 0; r < rows; r += kRows)
                    multiply_rows(rounded.data() + r * p.pairs, p.packed + panel * p.pairs * kTile, p.pairs, rows - r, outputs - panel * kTile, p.y + (first + r) * outputs + panel * kTile, outputs);
        },
        &product);
}

#else

bool has_bf16_products() { return false; }
bool has_bf16_tiles() { return false; }
void add_products(Pool &, const float *, const float *, int64_t, int64_t, int64_t, bool, float *) { std::abort(); }
void multiply(Pool &, const float *, int64_t, int64_t, const float *, int64_t, float *) { std::abort(); }

#endif

}  // namespace qforge
