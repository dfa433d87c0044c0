// What follows a block's sums in products with activations rounded by segments (blockwise.h), once for the instruction sets of x86: its scales, and the store at the end. The file that includes this gives V (sums_x86.inl).
#include "qforge/blockwise.h"

namespace qforge {
namespace {

inline V::Floats block_scales(const Weight &w, int64_t at) { return w.half_scales ? V::load_halves(w.half_scales + at) : V::load(w.scales + at); }

// All scales of a tile as floats [blocks][16], where many rows follow
inline void make_scales(const Weight &w, int64_t tile, float *to) {
    for (int64_t b = 0; b < w.blocks; ++b, to += kTile) V::store(to, block_scales(w, (tile * w.blocks + b) * kTile), nullptr, kTile);
}

// What a block of T tiles is multiplied with; Made: its scales were made, for the first of the tiles from `made` on
template <bool Z, bool Made, int T>
struct BlockScales {
    V::Floats scale[T], zero[T];

    BlockScales(const Weight &w, int64_t tile, int64_t block, const float *made) {
        for (int t = 0; t < T; ++t) {
            const int64_t at = ((tile + t) * w.blocks + block) * kTile;
            scale[t] = Made ? V::load(made + (t * w.blocks + block) * kTile) : block_scales(w, at);
            if constexpr (!Z) zero[t] = V::zeros(w.zeros + at);
        }
    }
    // A row's total += weight scale * part, less what zero points that differ take away
    __attribute__((always_inline)) void add(V::Floats (&total)[T], V::Floats (&part)[T], const float *row_sum) const {
        for (int t = 0; t < T; ++t) {
            if constexpr (!Z) part[t] = V::fma_minus(zero[t], V::spread(*row_sum), part[t]);
            total[t] = V::fma(scale[t], part[t], total[t]);
        }
    }
};

// The same for R rows; row_sum: of the first row's first block
template <bool Z, bool Made = false, int R, int T>
inline __attribute__((always_inline)) void add_block(V::Floats (&total)[R][T], V::Floats (&part)[R][T], const Weight &w, int64_t tile, int64_t block, const float *row_sum, const float *made = nullptr) {
    const BlockScales<Z, Made, T> by(w, tile, block, made);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) by.add(total[r], part[r], row_sum + r * w.blocks + block);
}

template <int R, int T>
inline __attribute__((always_inline)) void store(const BlockwisePiece &p, const V::Floats (&total)[R][T], int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
        const int64_t column = (tile + t) * kTile;
        for (int r = 0; r < R; ++r) V::store(p.y + (row + r) * p.y_stride + column, total[r][t], w.bias ? w.bias + column : nullptr, w.columns - column);
    }
}

}  // namespace
}  // namespace qforge
