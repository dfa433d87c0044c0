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

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx512_vnni = {round_rows, piece, 12, kRowChunk, nullptr};

}  // namespace qforge
