// Products with activations rounded by segments for AVX2 (compiled with that flag; called only where CPUID has it). Around a middle, bytes are multiplied by codes of 4 bits and summed in 16 bits (narrow sums, blockwise.h).
// All else is multiplied as words, since products of two bytes, or sums of a few, do not fit into 16 bits.
#include "blockwise_256.inl"

namespace qforge {
namespace {

// What the sums of a segment start with; inputs: a multiple of 8
inline int32_t narrow_starts(const int8_t *codes, int64_t inputs) {
    const __m256i by = _mm256_set1_epi8(kNarrowLess);
    __m256i sum = _mm256_setzero_si256();
    for (; inputs >= 32; inputs -= 32, codes += 32) sum = _mm256_sub_epi16(sum, _mm256_maddubs_epi16(by, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes))));
    __m128i four = _mm_add_epi16(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    for (; inputs > 0; inputs -= 8, codes += 8) four = _mm_sub_epi16(four, _mm_maddubs_epi16(_mm256_castsi256_si128(by), _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes))));
    four = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi16(four, _mm_shuffle_epi32(four, 0xB1)));
}

// The codes of a segment as words, inputs 0 2 1 3 of every four (words_256.inl) -> their sum; inputs: a multiple of 8
inline int32_t round_words(const float *x, int64_t inputs, float inverse, int16_t *to) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < inputs; i += 8) {
        __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
        if (inverse == 0) code = _mm256_setzero_si256();
        sum = _mm256_add_epi32(sum, code);
        const __m256i even_first = _mm256_shuffle_epi32(code, 0xD8);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), _mm_packs_epi32(_mm256_castsi256_si128(even_first), _mm256_extracti128_si256(even_first, 1)));
    }
    return sum_of_lanes(sum);
}

struct V : V256 {
    using Sums = Bytes;  // pairs of bytes
    static constexpr bool kNarrow = true, kPanels = true, kWords = true;
    template <Format, int>
    static constexpr int kCodeRows = 6;  // 12 sums

    template <Format F>
    static Weights unpack(const uint8_t *chunk, int half) { return nibbles(load_bytes(chunk), half); }
    static Sums start(int32_t pair) { return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)}; }
    // Both less kNarrowSum, beside 0
    static Words sums_of(const Bytes &bytes) {
        const auto less = [](__m256i sums) { return _mm256_sub_epi16(sums, _mm256_set1_epi32(kNarrowSum)); };  // of 16 bits
        const Words sums = V256::sums_of(bytes);
        return {less(sums.lo), less(sums.hi)};
    }
    static Words load_words(const int16_t *p) {
        const auto *halves = reinterpret_cast<const __m128i *>(p);
        const auto less = [](const __m128i *eight) { return _mm256_cvtepu16_epi32(_mm_sub_epi16(_mm_loadu_si128(eight), _mm_set1_epi16(kNarrowSum))); };
        return {less(halves), less(halves + 1)};
    }
    // Compilers order these for the shortest wait, for which 16 registers are too few beside 12 sums: 31 multiplications of bytes a cycle (Zen 4) written out, 26 else
    static void add_products(Sums &sum, const Weights &w, Inputs x) {
        __m256i a, b;
        asm("vpbroadcastd %[x], %[a]\n\tvpmaddubsw %[a], %[wl], %[b]\n\tvpmaddubsw %[a], %[wh], %[a]\n\tvpaddw %[b], %[sl], %[sl]\n\tvpaddw %[a], %[sh], %[sh]"
            : [sl] "+x"(sum.lo), [sh] "+x"(sum.hi), [a] "=&x"(a), [b] "=&x"(b)
            : [wl] "x"(w.lo), [wh] "x"(w.hi), [x] "m"(*reinterpret_cast<const int8_t(*)[4]>(x)));
    }
    static Words whole(const Sums &pairs, int32_t offset) {
        const __m256i ones = _mm256_set1_epi16(1), from = _mm256_set1_epi32(offset);
        return add({from, from}, {_mm256_madd_epi16(pairs.lo, ones), _mm256_madd_epi16(pairs.hi, ones)});
    }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"
#include "words_256.inl"

namespace qforge {
namespace {

void piece(const BlockwisePiece &p, void *scratch) { centered(*p.weight) ? centered_piece(p, scratch) : words_piece(p); }

int64_t panel_bytes(const Weight &w) { return centered(w) ? (w.inputs() + w.blocks * static_cast<int64_t>(sizeof(float))) * kTile : 0; }

}  // namespace

constinit const BlockwiseFunctions blockwise_avx2 = {round_rows, piece, 12, kRowChunk, panel_bytes, true};

}  // namespace qforge
