// Products with activations rounded by segments for AVX-512 with VNNI (compiled with those flags; called only where CPUID has them).
#include "qforge/blockwise.h"
#include "vnni_512.inl"

namespace qforge {
namespace {

// Rounds one segment
template <int L>
inline CodeSums round_segment(const float *x, int64_t inputs, float inverse, int8_t *high, int8_t *low) {
    const __m512 by = _mm512_set1_ps(inverse);
    __m512i sum = _mm512_setzero_si512(), high_sum = sum;
    for (int64_t i = 0; i < inputs; i += kLanes) {
        const __mmask16 here = lanes(inputs - i);
        __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, x + i), by));
        if (inverse == 0) code = _mm512_setzero_si512();
        sum = _mm512_add_epi32(sum, code);
        if constexpr (L == 2) {
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            high_sum = _mm512_add_epi32(high_sum, upper);
            store_bytes(high + i, upper, inputs - i);
            store_bytes(low + i, _mm512_sub_epi32(code, _mm512_slli_epi32(upper, 8)), inputs - i);
        } else {
            store_bytes(high + i, code, inputs - i);
        }
    }
    const int32_t all = _mm512_reduce_add_epi32(sum);
    return {all, L == 2 ? _mm512_reduce_add_epi32(high_sum) : all};
}

inline void largest_bits_of_four(const float *x, int64_t x_step, uint32_t *bits) {
    const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); };
    __m512i most[4];
    for (int i = 0; i < 4; ++i) {
        const auto magnitudes = [&](const float *p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0x7FFFFFFF)); };
        most[i] = larger(magnitudes(x + i * x_step), magnitudes(x + i * x_step + kLanes));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i *>(bits), of_quarters(quarters(most[0], most[1], most[2], most[3], larger), larger));
}

// Segments whose codes are all 0 are left to round_segment: they may have inputs that are no numbers
inline bool round_four(const float *x, int64_t x_step, const float *inverse, int8_t *to, int64_t to_step, CodeSums *sums) {
    if (inverse[0] == 0 || inverse[1] == 0 || inverse[2] == 0 || inverse[3] == 0) return false;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    __m512i sum[2];
    for (int i = 0; i < 2; ++i, x += 2 * x_step, to += 2 * to_step) {
        const __m512 by = _mm512_set1_ps(inverse[2 * i]), next_by = _mm512_set1_ps(inverse[2 * i + 1]);
        const auto codes = [&](int64_t at, __m512 factor) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + at), factor)); };
        const __m512i halves = _mm512_packs_epi32(codes(0, by), codes(kLanes, by)), next_halves = _mm512_packs_epi32(codes(x_step, next_by), codes(x_step + kLanes, next_by));
        const __m512i bytes = _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), _mm512_packs_epi16(halves, next_halves));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + to_step), _mm512_extracti64x4_epi64(bytes, 1));
        sum[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    }
    const __m512i quarter = add(_mm512_shuffle_i64x2(sum[0], sum[1], 0x88), _mm512_shuffle_i64x2(sum[0], sum[1], 0xDD));
    const __m128i all = of_quarters(quarter, add);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums), _mm_unpacklo_epi32(all, all));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums + 2), _mm_unpackhi_epi32(all, all));
    return true;
}

// ---- segments around a middle ----

inline __m512i ordered(__m512i bits) { return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7FFFFFFF), 0x78); }  // bits ^ (sign & ...)
inline __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
inline __m512i smaller(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }

inline Extremes extremes(const float *x, int64_t inputs) {
    __m512i high = ordered(_mm512_set1_epi32(__builtin_bit_cast(int32_t, *x))), low = high;
    for (int64_t i = 0; i < inputs; i += kLanes) {
        const __mmask16 here = lanes(inputs - i);
        const __m512i v = ordered(_mm512_maskz_loadu_epi32(here, x + i));
        high = _mm512_mask_max_epi32(high, here, high, v);
        low = _mm512_mask_min_epi32(low, here, low, v);
    }
    return {_mm512_reduce_max_epi32(high), _mm512_reduce_min_epi32(low)};
}

inline void extremes_of_four(const float *x, int64_t x_step, int32_t *high, int32_t *low) {
    __m512i most[4], least[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, x += x_step) {
        const auto at = [&](int64_t k) { return ordered(_mm512_loadu_si512(x + k * kLanes)); };
        const __m512i a = at(0), b = at(1), c = at(2), d = at(3);
        most[i] = larger(larger(a, b), larger(c, d));
        least[i] = smaller(smaller(a, b), smaller(c, d));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i *>(high), of_quarters(quarters(most[0], most[1], most[2], most[3], larger), larger));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(low), of_quarters(quarters(least[0], least[1], least[2], least[3], smaller), smaller));
}

inline int32_t round_centered(const float *x, int64_t inputs, float inverse, int32_t middle, int8_t *to) {
    const __m512 by = _mm512_set1_ps(inverse);
    const __m512i less = _mm512_set1_epi32(middle);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += kLanes) {
        const __mmask16 here = lanes(inputs - i);
        __m512i code = _mm512_maskz_sub_epi32(here, _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, x + i), by)), less);
        if (inverse == 0) code = _mm512_setzero_si512();
        sum = _mm512_add_epi32(sum, code);
        store_bytes(to + i, code, inputs - i);
    }
    return _mm512_reduce_add_epi32(sum);
}

// Segments whose codes are all 0 are left to round_centered: they may have inputs that are no numbers
inline bool round_four_centered(const float *x, int64_t x_step, const float *inverse, const int32_t *middle, int8_t *to, int64_t to_step, CodeSums *sums) {
    if (inverse[0] == 0 || inverse[1] == 0 || inverse[2] == 0 || inverse[3] == 0) return false;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    __m512i sum[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, x += x_step) {
        const __m512 by = _mm512_set1_ps(inverse[i]);
        const __m512i less = _mm512_set1_epi16(static_cast<short>(middle[i]));
        const auto codes = [&](int64_t at) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + at * kLanes), by)); };
        const auto words = [&](int64_t at) { return _mm512_sub_epi16(_mm512_packs_epi32(codes(at), codes(at + 1)), less); };
        const __m512i halves = _mm512_packs_epi16(words(0), words(2));
        const __m512i bytes = _mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), halves);
        _mm512_storeu_si512(to + i * to_step, bytes);
        sum[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    }
    const __m128i of_bytes = of_quarters(quarters(sum[0], sum[1], sum[2], sum[3], add), add);
    const __m128i all = _mm_add_epi32(of_bytes, _mm_slli_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(middle)), 6));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums), _mm_unpacklo_epi32(all, all));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums + 2), _mm_unpackhi_epi32(all, all));
    return true;
}

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"
#include "bytes_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx512_vnni = {round_rows, piece, 12, kRowChunk, nullptr, true};

}  // namespace qforge
