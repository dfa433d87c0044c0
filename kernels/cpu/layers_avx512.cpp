// The functions of layers.h for AVX-512 with VNNI and BF16 (compiled with those flags; called only where CPUID has them): what AVX2 does, with their dot products in attention.
#include <immintrin.h>

#include <type_traits>

#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_512.inl"

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
