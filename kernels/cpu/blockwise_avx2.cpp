// Products with activations rounded by segments for AVX2 (compiled with that flag; called only where CPUID has it). Products of 4-bit codes and bytes are summed in 16 bits,
// which hold 32 inputs: 8 products of pairs, each at most 15 * 128 * 2. Bytes of weights are taken as two 4-bit halves. Sums of segments around a middle wrap (blockwise.h), and hold all 64 inputs.
#include "blockwise_256.inl"

namespace qforge {
namespace {

// What the sums of a segment start with; inputs: a multiple of 8
inline int32_t wrapped_starts(const int8_t *codes, int64_t inputs) {
    const __m256i by = _mm256_set1_epi8(kWrappedLess);
    __m256i sum = _mm256_setzero_si256();
    for (; inputs >= 32; inputs -= 32, codes += 32) sum = _mm256_sub_epi16(sum, _mm256_maddubs_epi16(by, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes))));
    __m128i four = _mm_add_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    for (; inputs > 0; inputs -= 8, codes += 8) four = _mm_sub_epi16(four, _mm_maddubs_epi16(_mm256_castsi256_si128(by), _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes))));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi16(four, _mm_shuffle_epi32(four, 0xB1)));
}

struct V : V256 {
    using Sums = Bytes;  // pairs of bytes
    static constexpr bool kWraps = true, kPanels = true;
    template <Format F>
    static constexpr int kParts = F == Format::INT8 ? 2 : 1;  // the lower 4 bits, and the upper ones
    static constexpr bool kFirst = true;  // 16 bits do not hold an offset, too

    // 12 sums
    template <Format F, int L>
    static constexpr int kCodeRows = F == Format::INT4 ? 6 : L == 2 ? 2 : 3;

    template <Format F>
    static Weights unpack(const uint8_t *chunk, int half, int part) { return F == Format::INT4 ? nibbles(load_bytes(chunk), half) : nibbles(load_bytes(chunk + 64 * half), part); }
    static Sums start(int32_t pair) { return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)}; }
    // Less kWrappedSum, beside 0
    static Words load_words(const int16_t *p) {
        const auto *halves = reinterpret_cast<const __m128i *>(p);
        const auto less = [](const __m128i *eight) { return _mm256_cvtepu16_epi32(_mm_sub_epi16(_mm_loadu_si128(eight), _mm_set1_epi16(kWrappedSum))); };
        return {less(halves), less(halves + 1)};
    }
    // Compilers order these for the shortest wait, for which 16 registers are too few beside 12 sums: 31 multiplications of bytes a cycle (Zen 4) written out, 26 else
    template <bool First>
    static void add_products(Sums &sum, const Weights &w, Inputs x) {
        const auto &four = *reinterpret_cast<const int8_t(*)[4]>(x);
        if constexpr (First) {
            asm("vpbroadcastd %[x], %[lo]\n\tvpmaddubsw %[lo], %[wh], %[hi]\n\tvpmaddubsw %[lo], %[wl], %[lo]" : [lo] "=&x"(sum.lo), [hi] "=&x"(sum.hi) : [wl] "x"(w.lo), [wh] "x"(w.hi), [x] "m"(four));
            return;
        }
        __m256i a, b;
        asm("vpbroadcastd %[x], %[a]\n\tvpmaddubsw %[a], %[wl], %[b]\n\tvpmaddubsw %[a], %[wh], %[a]\n\tvpaddw %[b], %[sl], %[sl]\n\tvpaddw %[a], %[sh], %[sh]"
            : [sl] "+x"(sum.lo), [sh] "+x"(sum.hi), [a] "=&x"(a), [b] "=&x"(b)
            : [wl] "x"(w.lo), [wh] "x"(w.hi), [x] "m"(four));
    }
    static Words times(const Sums &pairs, short factor) { return {_mm256_madd_epi16(pairs.lo, _mm256_set1_epi16(factor)), _mm256_madd_epi16(pairs.hi, _mm256_set1_epi16(factor))}; }
    template <Format F>
    static Words whole(const Sums *sum, int32_t offset) {
        const Words from{_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)}, lower = add(from, times(sum[0], 1));
        return kParts<F> == 1 ? lower : add(lower, times(sum[1], 16));
    }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"

namespace qforge {
namespace {

int64_t panel_bytes(const Weight &w) { return centered(w) ? w.inputs() * kTile : 0; }

}  // namespace

constinit const BlockwiseFunctions blockwise_avx2 = {round_rows, piece, 12, kRowChunk, panel_bytes, true};

}  // namespace qforge
