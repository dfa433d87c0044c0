// The functions of layers.h for AVX-512 with BF16 (compiled with those flags; called only where CPUID has them): the dot products of a bf16 cache are the CPU's own.
#include <immintrin.h>

#include <type_traits>

#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_256.inl"

// Queries or weights [count] (even) in place: as bf16, pairs in the places of single floats
inline void prepare(float *x, int64_t count, Bf16) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) _mm512_storeu_si512(x + i / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
    if (i == count) return;
    const auto upto = [](int64_t lanes) { return static_cast<__mmask16>(lanes >= 16 ? 0xffff : lanes <= 0 ? 0 : (1 << lanes) - 1); };
    const __m512bh last = _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(upto(count - i - 16), x + i + 16), _mm512_maskz_loadu_ps(upto(count - i), x + i));
    _mm512_mask_storeu_epi32(x + i / 2, upto((count - i) / 2), (__m512i)last);
}

// lo, hi += 16 pairs x one prepared pair of each row, for `steps` pairs that lie `step` apart; rows are `apart` pairs from each other
template <int R>
inline void add_pairs(const float *rows, int64_t apart, const Bf16 *pairs, int64_t step, int64_t steps, Lanes *lo, Lanes *hi) {
    __m512 sum[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sum[r] = _mm512_insertf32x8(_mm512_castps256_ps512(lo[r].v), hi[r].v, 1);
    for (int64_t i = 0; i < steps; ++i) {
        const __m512bh both = (__m512bh)_mm512_loadu_si512(pairs + i * step);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_castps_si512(_mm512_set1_ps(rows[r * apart + i])), both);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        lo[r].v = _mm512_castps512_ps256(sum[r]);
        hi[r].v = _mm512_extractf32x8_ps(sum[r], 1);
    }
}

template <int R>
inline void add_scores(const float *query, int64_t d, const Bf16 *keys, Lanes *lo, Lanes *hi) {
    add_pairs<R>(query, d / 2, keys, 32, d / 2, lo, hi);
}

template <int R>
inline void add_values(const float *weights, int64_t from, int64_t stride, const Bf16 *values, int64_t wide, Lanes *lo, Lanes *hi) {
    add_pairs<R>(weights + from / 2, stride / 2, values, 2 * wide, 8, lo, hi);
}

#define QFORGE_BF16_DOTS
#include "layers.inl"

}  // namespace

const LayerFunctions layers_avx512_bf16{norm, residual, gate, rotate_and_store, attend};

}  // namespace qforge
