// Products with activations rounded by segments for AVX-VNNI (compiled with that flag; called only where CPUID has it): 32 products of bytes at once, added to 32-bit sums.
#include "blockwise_256.inl"

namespace qforge {
namespace {

// Rounds one segment
template <int L>
inline CodeSums round_segment(const float *x, int64_t inputs, float inverse, int8_t *high, int8_t *low) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i sum = _mm256_setzero_si256(), high_sum = sum;
    for (int64_t i = 0; i < inputs; i += 8) {
        __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
        if (inverse == 0) code = _mm256_setzero_si256();
        sum = _mm256_add_epi32(sum, code);
        if constexpr (L == 2) {
            const __m256i upper = _mm256_srai_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(128)), 8);
            high_sum = _mm256_add_epi32(high_sum, upper);
            store_bytes(high + i, upper);
            store_bytes(low + i, _mm256_sub_epi32(code, _mm256_slli_epi32(upper, 8)));
        } else {
            store_bytes(high + i, code);
        }
    }
    const int32_t all = sum_of_lanes(sum);
    return {all, L == 2 ? sum_of_lanes(high_sum) : all};
}

// Segments whose codes are all 0 are left to round_segment: they may have inputs that are no numbers
inline bool round_four(const float *x, int64_t x_step, const float *inverse, int8_t *to, int64_t to_step, CodeSums *sums) {
    if (inverse[0] == 0 || inverse[1] == 0 || inverse[2] == 0 || inverse[3] == 0) return false;
    const __m256i ones = _mm256_set1_epi16(1), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i sum[4];
    for (int i = 0; i < 4; ++i, x += x_step, to += to_step) {
        const __m256 by = _mm256_set1_ps(inverse[i]);
        const auto codes = [&](int at) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + at), by)); };
        const __m256i halves = _mm256_packs_epi32(codes(0), codes(8)), next_halves = _mm256_packs_epi32(codes(16), codes(24));
        sum[i] = _mm256_add_epi32(_mm256_madd_epi16(halves, ones), _mm256_madd_epi16(next_halves, ones));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(halves, next_halves), order));
    }
    const __m128i all = of_four(sum, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums), _mm_unpacklo_epi32(all, all));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums + 2), _mm_unpackhi_epi32(all, all));
    return true;
}

struct V : V256 {
    using Sums = Words;
    static constexpr bool kNarrow = false, kPanels = false, kWords = false;
    template <Format F, int L>
    static constexpr int kCodeRows = 6;

    template <Format F>
    static Weights unpack(const uint8_t *chunk, int half) { return F == Format::INT8 ? load_bytes(chunk + 64 * half) : nibbles(load_bytes(chunk), half); }
    static Sums start(int32_t offset) { return start_words(offset); }
    static void add_products(Sums &sum, const Weights &w, Inputs x) {  // written out for the reason that blockwise_avx2.cpp gives
        __m256i a;
        asm("vpbroadcastd %[x], %[a]\n\t%{vex%} vpdpbusd %[a], %[wl], %[sl]\n\t%{vex%} vpdpbusd %[a], %[wh], %[sh]"
            : [sl] "+x"(sum.lo), [sh] "+x"(sum.hi), [a] "=&x"(a)
            : [wl] "x"(w.lo), [wh] "x"(w.hi), [x] "m"(*reinterpret_cast<const int8_t(*)[4]>(x)));
    }
    static Words join(const Words &high, const Words &low) {
        return {_mm256_add_epi32(_mm256_slli_epi32(high.lo, 8), low.lo), _mm256_add_epi32(_mm256_slli_epi32(high.hi, 8), low.hi)};
    }
    static Words whole(const Sums &sum, int32_t) { return sum; }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"
#include "bytes_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx_vnni = {round_rows, piece, 12, kRowChunk, nullptr, true};

}  // namespace qforge
