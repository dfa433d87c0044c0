// Products with activations rounded by segments for AVX-VNNI (compiled with that flag; called only where CPUID has it): 32 products of bytes at once, added to 32-bit sums.
#include "blockwise_256.inl"

namespace qforge {
namespace {

struct V : V256 {
    using Sums = Words;
    static constexpr bool kWraps = false, kPanels = false, kWords = false;
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
    static Words whole(const Sums &sum, int32_t) { return sum; }
};

}  // namespace
}  // namespace qforge

#include "blockwise_x86.inl"
#include "bytes_x86.inl"

namespace qforge {

constinit const BlockwiseFunctions blockwise_avx_vnni = {round_rows, piece, 12, kRowChunk, nullptr, true};

}  // namespace qforge
