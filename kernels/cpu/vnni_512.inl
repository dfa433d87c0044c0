// Inputs to be rounded, and 16 columns as one vector of 512 bits with VNNI: 64 products of bytes at once, added to 32-bit sums. What V offers: sums_x86.inl and the files that include this.
#include <immintrin.h>

#include "qforge/linear.h"

namespace qforge {
namespace {

// ---- rounding, 16 inputs at a time ----

constexpr int64_t kLanes = 16;

// Inputs come by eights
inline __mmask16 lanes(int64_t inputs) { return inputs >= kLanes ? 0xFFFF : 0xFF; }

// The bits of the largest magnitude: of finite floats they rise with the value, those of infinities and NaNs are larger still
inline uint32_t largest_bits(const float *x, int64_t inputs) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += kLanes) most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_maskz_loadu_epi32(lanes(inputs - i), x + i), _mm512_set1_epi32(0x7FFFFFFF)));
    return _mm512_reduce_max_epu32(most);
}

// Codes that fit a byte; a masked store that narrows them would take 40 cycles on Zen 4
inline void store_bytes(int8_t *to, __m512i codes, int64_t inputs) {
    const __m128i bytes = _mm512_cvtepi32_epi8(codes);
    if (inputs >= kLanes) _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
    else _mm_storel_epi64(reinterpret_cast<__m128i *>(to), bytes);
}

// ---- four sums or extremes at once ----

// Four vectors -> one of 32-bit lanes, whose 128-bit lane i is `combine` over the four of vector i
template <typename F>
inline __m512i quarters(__m512i a, __m512i b, __m512i c, __m512i d, const F &combine) {
    const __m512i ab = combine(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE)), cd = combine(_mm512_shuffle_i64x2(c, d, 0x44), _mm512_shuffle_i64x2(c, d, 0xEE));
    return combine(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xDD));
}

// `combine` over each 128-bit lane, the first lane's first
template <typename F>
inline __m128i of_quarters(__m512i v, const F &combine) {
    v = combine(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
    v = combine(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
    return _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), v));
}

// ---- products ----

struct V {
    using Inputs = __m512i;
    using Floats = __m512;
    using Weights = __m512i;
    using Sums = __m512i;
    using Integers = __m512i;
    static constexpr bool kNarrow = false, kPanels = false, kWords = false;
    static constexpr bool kByMagic = true;

    // 12 sums, which leave some of the parts and totals to memory. A Zen 5 adds to two sums a cycle, and each addition takes 4, so that the 8 sums of 4 rows wait for themselves: 5 rows take 23 % less time at once than
    // as 3 and 2, 6 rows 11 % less, 12 rows 7 %. A Zen 4, which adds to one: 5 rows 14 %, 12 rows 7 % (blocks of 128: 8 and 0).
    template <Format F, int L>
    static constexpr int kCodeRows = 6;
    // Few rows read memory fastest as one stream (71 us against 94 with four, 2048 x 2048).
    static constexpr int tiles(int code_rows) { return code_rows <= 2 ? 1 : 2; }

    template <Format F>
    static Weights unpack(const uint8_t *chunk, int half) {
        if constexpr (F == Format::INT8) return _mm512_loadu_si512(chunk + 64 * half);
        const __m512i both = _mm512_loadu_si512(chunk);
        return _mm512_and_si512(half ? _mm512_srli_epi32(both, 4) : both, _mm512_set1_epi8(15));
    }
    static Weights load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
    static void store_bytes(uint8_t *p, Weights b) { _mm512_storeu_si512(p, b); }
    static const int8_t *pointer(const int8_t *x) { return x; }
    static Inputs inputs(const int8_t *x) {
        int four;
        __builtin_memcpy(&four, x, 4);
        return _mm512_set1_epi32(four);
    }
    static Sums start(int32_t offset) { return _mm512_set1_epi32(offset); }
    static void add_products(Sums &sum, Weights w, Inputs x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
    static Integers whole(Sums sum, int32_t) { return sum; }
    static Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
    static void add_bytes(Weights &to, Weights b) { to = _mm512_add_epi8(to, b); }
    static Integers sums_of(Weights bytes) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, _mm512_set1_epi8(1)); }
    static Integers load_words(const int16_t *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    static Integers add_products_of(Integers sum, Integers pairs, int32_t pair) { return _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(pair)); }
    static __m512i join(__m512i high, __m512i low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
    static Floats to_floats(__m512i sum) { return _mm512_cvtepi32_ps(sum); }
    static Floats as_floats(__m512i bits) { return _mm512_castsi512_ps(bits); }

    static constexpr bool kAway = false;  // the compiler chooses which parts and totals lie in memory: all of them took 15 % longer
    template <typename Array>
    static void put_away(Array &) {}
    static Floats spread(float v) { return _mm512_set1_ps(v); }
    static Floats load(const float *p) { return _mm512_loadu_ps(p); }
    static Floats load_halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    static Floats zeros(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats fma_less(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
    static Floats fma_minus(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static void store(float *y, Floats v, const float *bias, int64_t columns) {
        const __mmask16 mask = columns >= kTile ? 0xFFFF : static_cast<__mmask16>((1u << columns) - 1);
        _mm512_mask_storeu_ps(y, mask, bias ? _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, bias)) : v);
    }
};

}  // namespace
}  // namespace qforge
