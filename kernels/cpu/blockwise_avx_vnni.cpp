// Products with activations rounded by segments for AVX-VNNI (compiled with that flag; called only where CPUID has it): 32 products of bytes at once, added to 32-bit sums.
#include "blockwise_256.inl"

namespace qforge {
namespace {

struct V : V256 {
    template <Format F>
    using Weights = Bytes;
    template <Format F>
    using Sums = Words;

    template <Format F, int L>
    static constexpr int kCodeRows = 6;

    template <Format F>
    static Weights<F> unpack(const uint8_t *chunk, int half) { return F == Format::INT8 ? load_bytes(chunk + 64 * half) : nibbles(load_bytes(chunk), half); }
    template <Format F>
    static Sums<F> start(int32_t offset) { return {_mm256_set1_epi32(offset), _mm256_set1_epi32(offset)}; }
    template <Format F>
    static void add_products(Sums<F> &sum, const Weights<F> &w, Inputs x) { sum = {_mm256_dpbusd_avx_epi32(sum.lo, w.lo, x), _mm256_dpbusd_avx_epi32(sum.hi, w.hi, x)}; }
    template <Format F>
    static Words whole(const Sums<F> &sum, int32_t) { return sum; }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx_vnni = {round_rows, piece, 12, kRowChunk, nullptr};

}  // namespace qforge
