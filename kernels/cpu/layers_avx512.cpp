// The functions of layers.h for AVX-512 with VNNI and BF16 (compiled with those flags; called only where CPUID has them): what AVX2 does, with their dot products in attention.
#include <immintrin.h>

#include <type_traits>

#include "qforge/layers.h"

namespace qforge {
namespace {

struct Lanes {
    __m512 v;
    static Lanes load(const float *p) { return {_mm512_loadu_ps(p)}; }
    static Lanes load(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))}; }
    static Lanes load(const Fp8 *p) {
        const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));  // E4M3's exponent, at a half's place, is 8 too small
        const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(0x3f80));
        return {_mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x4000))))};
    }
    static Lanes set(float x) { return {_mm512_set1_ps(x)}; }
    static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
    static Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
    static Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
    static Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
    static Lanes round(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static Lanes exp_scale(Lanes p, Lanes n) { return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23)))}; }
    static Lanes keep_above(Lanes x, Lanes limit, Lanes y) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GT_OQ), y.v)}; }
    static void to_bf16(Lanes x, void *to) {
        const __m512i bits = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        store_halves(_mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16), to);
    }
    static void to_int16(Lanes x, void *to) { store_halves(_mm512_cvtps_epi32(x.v), to); }
    void store(float *p) const { _mm512_storeu_ps(p, v); }

  private:
    static void store_halves(__m512i x, void *to) { _mm256_storeu_si256(static_cast<__m256i *>(to), _mm512_cvtepi32_epi16(x)); }  // the lower ones
};

inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

struct IntegerDots {
    using Columns = __m512i;
    __m512i v = _mm512_setzero_si512();
    static Columns load(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
    void add(Columns c, const float &pair) { asm("vpdpwssd %1%{1to16%}, %2, %0" : "+v"(v) : "m"(pair), "v"(c)); }
    Lanes get() const { return {_mm512_cvtepi32_ps(v)}; }
};

struct Bf16Dots {
    using Columns = __m512bh;
    __m512 v = _mm512_setzero_ps();
    static Columns load(const Bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    void add(Columns c, const float &pair) { asm("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(v) : "m"(pair), "v"(c)); }
    Lanes get() const { return {v}; }
};

constexpr int kSums = 12;

#include "layers.inl"

}  // namespace

constinit const LayerFunctions layers_avx512{norm, residual, gate, rotate_and_store, clear_after, attend};

}  // namespace qforge
