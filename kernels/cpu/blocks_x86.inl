// What follows a block's sums in products with activations rounded by segments (blockwise.h), once for the instruction sets of x86: its scales, and the store at the end. The file that includes this gives V (sums_x86.inl).
#include "qforge/blockwise.h"

namespace qforge {
namespace {

// totals += weight scale * part, less what zero points that differ take away; row_sum: of the first row's first block
template <bool Z, int R, int T>
inline __attribute__((always_inline)) void add_block(V::Floats (&total)[R][T], V::Floats (&part)[R][T], const Weight &w, int64_t tile, int64_t block, const float *row_sum) {
    for (int t = 0; t < T; ++t) {
        const int64_t at = ((tile + t) * w.blocks + block) * kTile;
        const V::Floats weight_scale = V::load(w.scales + at);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            if constexpr (!Z) part[r][t] = V::fma_minus(V::zeros(w.zeros + at), V::spread(row_sum[r * w.blocks + block]), part[r][t]);
            total[r][t] = V::fma(weight_scale, part[r][t], total[r][t]);
        }
    }
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
