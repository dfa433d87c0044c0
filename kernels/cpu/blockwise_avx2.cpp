// Products with activations rounded by segments for AVX2 (compiled with that flag; called only where CPUID has it). Products of 4-bit codes and bytes are summed in 16 bits,
// which holds a whole segment: 8 products of pairs, each at most 15 * 128 * 2. Bytes of weights are taken as two 4-bit halves.
#include "blockwise_256.inl"

namespace qforge {
namespace {

inline __m256i add_pairs(__m256i sum, __m256i w, __m256i x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }

struct V : V256 {
    struct Halves {  // of bytes: lower and upper 4 bits; or the sums of their products
        Bytes lower, upper;
    };
    template <Format F>
    using Weights = std::conditional_t<F == Format::INT8, Halves, Bytes>;
    template <Format F>
    using Sums = Weights<F>;

    template <Format F, int L>
    static constexpr int kCodeRows = F == Format::INT8 ? 2 : 6;

    template <Format F>
    static Weights<F> unpack(const uint8_t *chunk, int half) {
        if constexpr (F == Format::INT4) return nibbles(load_bytes(chunk), half);
        else {
            const Bytes b = load_bytes(chunk + 64 * half);
            return {nibbles(b, false), nibbles(b, true)};
        }
    }
    template <Format F>
    static Sums<F> start(int32_t) {  // 16 bits do not hold an offset, too: `whole` adds it
        if constexpr (F == Format::INT4) return nothing<Bytes>();
        else return {nothing<Bytes>(), nothing<Bytes>()};
    }
    static void add(Bytes &sum, const Bytes &w, Inputs x) { sum = {add_pairs(sum.lo, w.lo, x), add_pairs(sum.hi, w.hi, x)}; }
    template <Format F>
    static void add_products(Sums<F> &sum, const Weights<F> &w, Inputs x) {
        if constexpr (F == Format::INT4) add(sum, w, x);
        else {
            add(sum.lower, w.lower, x);
            add(sum.upper, w.upper, x);
        }
    }
    static Words times(const Bytes &pairs, short factor) { return {_mm256_madd_epi16(pairs.lo, _mm256_set1_epi16(factor)), _mm256_madd_epi16(pairs.hi, _mm256_set1_epi16(factor))}; }
    static Words add(const Words &a, const Words &b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
    template <Format F>
    static Words whole(const Sums<F> &sum, int32_t offset) {
        const Words from{_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)};
        if constexpr (F == Format::INT4) return add(from, times(sum, 1));
        else return add(from, add(times(sum.lower, 1), times(sum.upper, 16)));
    }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx2 = {round_rows, piece, 12, kRowChunk, nullptr};

}  // namespace qforge
