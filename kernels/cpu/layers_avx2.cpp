// The functions of layers.h for AVX2 + FMA (compiled with those flags; called only where CPUID has them).
#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "qforge/layers.h"

namespace qforge {
namespace {

struct Lanes {
    __m256 lo, hi;
    static Lanes load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Lanes load(const uint16_t *p) { return {_mm256_cvtph_ps(eight(p)), _mm256_cvtph_ps(eight(p + 8))}; }
    static Lanes load(const Fp8 *p) {
        const __m128i codes = eight(p);
        return {_mm256_cvtph_ps(halves(codes)), _mm256_cvtph_ps(halves(_mm_srli_si128(codes, 8)))};
    }
    static Lanes set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static Lanes fma(const Lanes &a, const Lanes &b, const Lanes &c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
    static Lanes add(const Lanes &a, const Lanes &b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
    static Lanes sub(const Lanes &a, const Lanes &b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
    static Lanes mul(const Lanes &a, const Lanes &b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
    static Lanes guess_reciprocal(const Lanes &x) { return {guess_reciprocal(x.lo), guess_reciprocal(x.hi)}; }
    static Lanes max(const Lanes &a, const Lanes &b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
    static Lanes min(const Lanes &a, const Lanes &b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
    static Lanes max_or_nan(const Lanes &a, const Lanes &b) { return {larger(a.lo, b.lo), larger(a.hi, b.hi)}; }
    Lanes magnitude() const {
        const __m256 sign = _mm256_set1_ps(-0.0f);
        return {_mm256_andnot_ps(sign, lo), _mm256_andnot_ps(sign, hi)};
    }
    static Lanes round(const Lanes &a) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
    }
    static Lanes exp_scale(const Lanes &x, const Lanes &p, const Lanes &n) { return zero_below(x, set(-126.0f), {exp_scale(p.lo, n.lo), exp_scale(p.hi, n.hi)}); }
    static Lanes div(const Lanes &a, const Lanes &b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
    static Lanes zero_below(const Lanes &x, const Lanes &limit, const Lanes &y) {
        return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLE_UQ), y.lo), _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLE_UQ), y.hi)};
    }
    static void to_bf16(const Lanes &x, void *to) { store_halves(upper_halves(x.lo), upper_halves(x.hi), to); }
    static void to_bytes(const Lanes &x, void *to) {
        const __m256i codes = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)), 0xd8);
        _mm_storeu_si128(static_cast<__m128i *>(to), _mm_packs_epi16(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
    }
    static void to_int16(const Lanes &x, void *to) {
        const __m256i lower = _mm256_set1_epi32(0xffff);
        store_halves(_mm256_and_si256(_mm256_cvtps_epi32(x.lo), lower), _mm256_and_si256(_mm256_cvtps_epi32(x.hi), lower), to);
    }
    void store(float *p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    float sum() const {
        __m256 s = _mm256_add_ps(lo, hi);
        s = _mm256_hadd_ps(s, s);
        s = _mm256_hadd_ps(s, s);
        return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    static void largest_or_nan(const Lanes *x, int64_t count, float *to) {
        for (int64_t i = 0; i < count; ++i) to[i] = x[i].largest_or_nan();
    }
    Lanes within(int64_t first, int64_t last, float other) const {
        const auto kept = [&](__m256 x, int from) {
            const __m256 lanes = _mm256_add_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_ps(static_cast<float>(from)));
            const auto clamped = [](int64_t lane) { return _mm256_set1_ps(static_cast<float>(std::clamp<int64_t>(lane, -1, 16))); };
            return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_and_ps(_mm256_cmp_ps(lanes, clamped(first), _CMP_GE_OQ), _mm256_cmp_ps(lanes, clamped(last), _CMP_LE_OQ)));
        };
        return {kept(lo, 0), kept(hi, 8)};
    }
    float largest_or_nan() const {
        const __m256i a = _mm256_castps_si256(larger(lo, hi));
        __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
        return __builtin_bit_cast(float, _mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1))));
    }
    float largest() const {
        const __m256 a = _mm256_max_ps(lo, hi);
        __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
    }

  private:
    static __m256 larger(__m256 a, __m256 b) { return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }
    static __m128i eight(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }  // halves, or twice as many bytes
    static __m128i halves(__m128i codes) {  // of the lower eight FP8 codes
        const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));  // E4M3's exponent, at a half's place, is 8 too small
        const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(half, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(0x3f80));
        return _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x4000)));
    }
    static __m256 guess_reciprocal(__m256 x) { return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(kReciprocal), _mm256_castps_si256(x))); }
    static __m256 exp_scale(__m256 p, __m256 n) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23))); }
    static __m256i upper_halves(__m256 x) {  // rounded
        const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    }
    // the lower halves of 32-bit integers whose upper halves are 0
    static void store_halves(__m256i lo, __m256i hi, void *to) { _mm256_storeu_si256(static_cast<__m256i *>(to), _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8)); }
};

inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

struct IntegerDots {
    static constexpr int64_t kCodes = 2;
    static constexpr int64_t beside(int) { return 0; }  // codes of weights take the place of the weights
    static constexpr auto pack = [](const Lanes &x, void *to) { Lanes::to_int16(x, to); };
    static IntegerDots from(int32_t) { return {}; }
    static auto key(const int8_t *p) { return load(p); }
    static auto value(const int8_t *p, int64_t) { return load(p); }
    struct Columns {
        __m256i lo, hi;
    };
    __m256i lo = _mm256_setzero_si256(), hi = lo;
    static Columns load(const int8_t *p) {
        const auto *pairs = reinterpret_cast<const __m128i *>(p);
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128(pairs)), _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs + 1))};
    }
    // Written out, so that 12 sums stay in registers (see blockwise_avx2.cpp)
    void add(const Columns &c, const float &pair) {
        __m256i a, b;
        asm("vpbroadcastd %[x], %[a]\n\tvpmaddwd %[a], %[cl], %[b]\n\tvpmaddwd %[a], %[ch], %[a]\n\tvpaddd %[b], %[lo], %[lo]\n\tvpaddd %[a], %[hi], %[hi]"
            : [lo] "+x"(lo), [hi] "+x"(hi), [a] "=&x"(a), [b] "=&x"(b)
            : [cl] "x"(c.lo), [ch] "x"(c.hi), [x] "m"(pair));
    }
    Lanes get() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};

using KeyDots = IntegerDots;
using ValueDots = IntegerDots;

struct Bf16Dots {
    static constexpr int64_t kCodes = 2;
    struct Columns {
        __m256i lo, hi;
    };
    __m256 lo = _mm256_setzero_ps(), hi = lo;
    static Bf16Dots from(int32_t) { return {}; }
    static Columns key(const Bf16 *p) {
        const auto *pairs = reinterpret_cast<const __m256i *>(p);
        return {_mm256_loadu_si256(pairs), _mm256_loadu_si256(pairs + 1)};
    }
    static Columns value(const Bf16 *p, int64_t) { return key(p); }
    static __m256 first(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
    static __m256 second(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))); }
    void add(const Columns &c, const float &pair) {
        const __m256i both = _mm256_castps_si256(_mm256_set1_ps(pair));
        lo = _mm256_fmadd_ps(first(both), first(c.lo), _mm256_fmadd_ps(second(both), second(c.lo), lo));
        hi = _mm256_fmadd_ps(first(both), first(c.hi), _mm256_fmadd_ps(second(both), second(c.hi), hi));
    }
    Lanes get() const { return {lo, hi}; }
};

inline void put_every_second(const int8_t *codes, int64_t count, int8_t *to, int64_t odd) {
    for (int64_t i = 0; i < count; ++i) to[2 * i + odd] = codes[i];
}

constexpr int kSums = 6;

#include "layers.inl"

}  // namespace

constinit const LayerFunctions layers_avx2{norm, residual, gate, rotate_and_store, clear_after, attend};

}  // namespace qforge
