// The functions of layers.h for AVX2 + FMA (compiled with those flags; called only where CPUID has them).
#include <immintrin.h>

#include <type_traits>

#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_256.inl"
struct IntegerDots {
    struct Columns {
        __m256i lo, hi;
    };
    __m256i lo = _mm256_setzero_si256(), hi = lo;
    static Columns load(const int8_t *p) {
        const auto *pairs = reinterpret_cast<const __m128i *>(p);
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128(pairs)), _mm256_cvtepi8_epi16(_mm_loadu_si128(pairs + 1))};
    }
    void add(const Columns &c, float pair) {
        const __m256i both = _mm256_castps_si256(_mm256_set1_ps(pair));
        lo = _mm256_add_epi32(lo, _mm256_madd_epi16(both, c.lo));
        hi = _mm256_add_epi32(hi, _mm256_madd_epi16(both, c.hi));
    }
    void get(Lanes &a, Lanes &b) const {
        a.v = _mm256_cvtepi32_ps(lo);
        b.v = _mm256_cvtepi32_ps(hi);
    }
};

struct Bf16Dots {
    struct Columns {
        __m256i lo, hi;
    };
    __m256 lo = _mm256_setzero_ps(), hi = lo;
    static Columns load(const Bf16 *p) {
        const auto *pairs = reinterpret_cast<const __m256i *>(p);
        return {_mm256_loadu_si256(pairs), _mm256_loadu_si256(pairs + 1)};
    }
    static __m256 first(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
    static __m256 second(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))); }
    void add(const Columns &c, float pair) {
        const __m256i both = _mm256_castps_si256(_mm256_set1_ps(pair));
        lo = _mm256_fmadd_ps(first(both), first(c.lo), _mm256_fmadd_ps(second(both), second(c.lo), lo));
        hi = _mm256_fmadd_ps(first(both), first(c.hi), _mm256_fmadd_ps(second(both), second(c.hi), hi));
    }
    void get(Lanes &a, Lanes &b) const {
        a.v = lo;
        b.v = hi;
    }
};

#include "layers.inl"

}  // namespace

constinit const LayerFunctions layers_avx2{norm, residual, gate, rotate_and_store, clear_after, attend};

}  // namespace qforge
