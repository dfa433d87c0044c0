// Rounding by 8 inputs, and 16 columns as two vectors of 256 bits, for blockwise_x86.inl: what AVX2 and AVX-VNNI share. The file that includes this gives the rest of V.
#include <immintrin.h>

#include <type_traits>

#include "qforge/blockwise.h"

namespace qforge {
namespace {

inline uint32_t largest_bits(const float *x, int64_t inputs) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i a = _mm256_setzero_si256();
    for (int64_t i = 0; i < inputs; i += 8) a = _mm256_max_epu32(a, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i)), magnitude));
    a = _mm256_max_epu32(a, _mm256_permute2x128_si256(a, a, 1));
    a = _mm256_max_epu32(a, _mm256_shuffle_epi32(a, 0x4E));
    a = _mm256_max_epu32(a, _mm256_shuffle_epi32(a, 0xB1));
    return static_cast<uint32_t>(_mm256_cvtsi256_si32(a));
}

inline int32_t sum_of_lanes(__m256i a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

inline void store_bytes(int8_t *to, __m256i words) {
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packs_epi16(halves, halves));
}

// `combine` over the lanes of each of four vectors, the first vector's first
template <typename F>
inline __m128i of_four(const __m256i (&v)[4], const F &combine) {
    const __m256i ab = combine(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1])), cd = combine(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    const __m256i all = combine(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    return _mm256_castsi256_si128(combine(all, _mm256_permute2x128_si256(all, all, 1)));
}

inline void largest_bits_of_four(const float *x, int64_t x_step, uint32_t *bits) {
    const auto larger = [](__m256i a, __m256i b) { return _mm256_max_epu32(a, b); };
    const auto magnitudes = [](const float *p) { return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), _mm256_set1_epi32(0x7FFFFFFF)); };
    __m256i most[4];
    for (int i = 0; i < 4; ++i, x += x_step) most[i] = larger(larger(magnitudes(x), magnitudes(x + 8)), larger(magnitudes(x + 16), magnitudes(x + 24)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(bits), of_four(most, larger));
}

// ---- segments around a middle ----

inline __m256i ordered(__m256i bits) { return _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32(0x7FFFFFFF))); }
inline __m256i larger(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
inline __m256i smaller(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }

// Lanes' largest and smallest
inline void spread_of(const float *x, int64_t inputs, __m256i &high, __m256i &low) {
    high = low = ordered(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x)));
    for (int64_t i = 8; i < inputs; i += 8) {
        const __m256i v = ordered(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i)));
        high = larger(high, v);
        low = smaller(low, v);
    }
}

inline Extremes extremes(const float *x, int64_t inputs) {
    __m256i high, low;
    spread_of(x, inputs, high, low);
    const auto of_lanes = [](__m256i v, auto combine) {
        v = combine(v, _mm256_permute2x128_si256(v, v, 1));
        v = combine(v, _mm256_shuffle_epi32(v, 0x4E));
        return _mm256_cvtsi256_si32(combine(v, _mm256_shuffle_epi32(v, 0xB1)));
    };
    return {of_lanes(high, larger), of_lanes(low, smaller)};
}

inline void extremes_of_four(const float *x, int64_t x_step, int32_t *high, int32_t *low) {
    __m256i most[4], least[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) spread_of(x + i * x_step, kCentered, most[i], least[i]);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(high), of_four(most, larger));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(low), of_four(least, smaller));
}

inline int32_t round_centered(const float *x, int64_t inputs, float inverse, int32_t middle, int8_t *to) {
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i less = _mm256_set1_epi32(middle);
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < inputs; i += 8) {
        __m256i code = _mm256_sub_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by)), less);
        if (inverse == 0) code = _mm256_setzero_si256();
        sum = _mm256_add_epi32(sum, code);
        store_bytes(to + i, code);
    }
    return sum_of_lanes(sum);
}

// Segments whose codes are all 0 are left to round_centered: they may have inputs that are no numbers
inline bool round_four_centered(const float *x, int64_t x_step, const float *inverse, const int32_t *middle, int8_t *to, int64_t to_step, CodeSums *sums) {
    if (inverse[0] == 0 || inverse[1] == 0 || inverse[2] == 0 || inverse[3] == 0) return false;
    const __m256i ones = _mm256_set1_epi16(1), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i sum[4];
    for (int i = 0; i < 4; ++i, x += x_step, to += to_step) {
        const __m256 by = _mm256_set1_ps(inverse[i]);
        const __m256i less = _mm256_set1_epi32(middle[i]);
        const auto codes = [&](int64_t at) { return _mm256_sub_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + at), by)), less); };
        sum[i] = _mm256_setzero_si256();
        for (int64_t half = 0; half < kCentered; half += 32) {
            const __m256i halves = _mm256_packs_epi32(codes(half), codes(half + 8)), next_halves = _mm256_packs_epi32(codes(half + 16), codes(half + 24));
            sum[i] = _mm256_add_epi32(sum[i], _mm256_add_epi32(_mm256_madd_epi16(halves, ones), _mm256_madd_epi16(next_halves, ones)));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + half), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(halves, next_halves), order));
        }
    }
    const __m128i of_bytes = of_four(sum, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
    const __m128i all = _mm_add_epi32(of_bytes, _mm_slli_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(middle)), 6));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums), _mm_unpacklo_epi32(all, all));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums + 2), _mm_unpackhi_epi32(all, all));
    return true;
}

struct Bytes {  // 4 inputs of 16 columns
    __m256i lo, hi;
};

struct Words {  // 16 columns
    __m256i lo, hi;
};

struct Columns {
    __m256 lo, hi;
};

struct V256 {
    using Inputs = const int8_t *;  // where they lie: a register for them is at hand only while they are multiplied
    using Floats = Columns;
    using Weights = Bytes;
    using Integers = Words;
    static constexpr bool kByMagic = false;  // one more number of each row, for which 16 registers are too few: .8 % slower

    static constexpr int tiles(int) { return 1; }  // registers hold no more for many rows, and few read memory fastest as one stream: 74 us against 110 with four (2048 x 2048)
    static Bytes load_bytes(const uint8_t *p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 32))}; }
    static void store_bytes(uint8_t *p, const Bytes &b) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), b.lo);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + 32), b.hi);
    }
    static void add_bytes(Bytes &to, const Bytes &b) { to = {_mm256_add_epi8(to.lo, b.lo), _mm256_add_epi8(to.hi, b.hi)}; }
    static Words sums_of(const Bytes &bytes) {
        const auto columns = [](__m256i b) { return _mm256_madd_epi16(_mm256_maddubs_epi16(b, _mm256_set1_epi8(1)), _mm256_set1_epi16(1)); };
        return {columns(bytes.lo), columns(bytes.hi)};
    }
    static Bytes nibbles(const Bytes &b, bool upper) {
        const __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(upper ? _mm256_srli_epi16(b.lo, 4) : b.lo, mask), _mm256_and_si256(upper ? _mm256_srli_epi16(b.hi, 4) : b.hi, mask)};
    }
    // In a register of its own for each row: else compilers make one address of another before every load
    static const int8_t *pointer(const int8_t *x) {
        asm("" : "+r"(x));
        return x;
    }
    static Inputs inputs(const int8_t *x) { return x; }
    static constexpr bool kAway = true;
    // Parts and totals into memory, so that 16 registers are left to sums and what is added to them; one row's fit
    template <typename T, int R, int N>
    static void put_away(T (&floats)[R][N]) {
        if constexpr (R > 1) asm volatile("" : "+m"(floats));
    }
    static Words start_words(int32_t offset) { return {_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)}; }
    static Words add(const Words &a, const Words &b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
    static Words load_words(const int16_t *p) {
        const auto *halves = reinterpret_cast<const __m128i *>(p);
        return {_mm256_cvtepi16_epi32(_mm_loadu_si128(halves)), _mm256_cvtepi16_epi32(_mm_loadu_si128(halves + 1))};
    }
    static Words add_products_of(const Words &sum, const Words &pairs, int32_t pair) {
        const __m256i by = _mm256_set1_epi32(pair);
        return add(sum, {_mm256_madd_epi16(pairs.lo, by), _mm256_madd_epi16(pairs.hi, by)});
    }
    static Floats to_floats(const Words &w) { return {_mm256_cvtepi32_ps(w.lo), _mm256_cvtepi32_ps(w.hi)}; }
    static Floats as_floats(const Words &bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }

    static Floats spread(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
    static Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Floats load_halves(const uint16_t *p) {
        const auto *eight = reinterpret_cast<const __m128i *>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(eight)), _mm256_cvtph_ps(_mm_loadu_si128(eight + 1))};
    }
    static Floats zeros(const uint8_t *p) {
        const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(z)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(z, 8)))};
    }
    static Floats multiply(const Floats &a, const Floats &b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    static Floats fma(const Floats &a, const Floats &b, const Floats &c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
    static Floats fma_less(const Floats &a, const Floats &b, const Floats &c) { return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)}; }
    static Floats fma_minus(const Floats &a, const Floats &b, const Floats &c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }
    static void store(float *y, Floats v, const float *bias, int64_t columns) {
        if (columns >= kTile) {
            if (bias) v = {_mm256_add_ps(v.lo, _mm256_loadu_ps(bias)), _mm256_add_ps(v.hi, _mm256_loadu_ps(bias + 8))};
            _mm256_storeu_ps(y, v.lo);
            _mm256_storeu_ps(y + 8, v.hi);
            return;
        }
        alignas(32) float last[kTile];
        _mm256_store_ps(last, v.lo);
        _mm256_store_ps(last + 8, v.hi);
        for (int64_t c = 0; c < columns; ++c) y[c] = bias ? last[c] + bias[c] : last[c];
    }
};

}  // namespace
}  // namespace qforge
