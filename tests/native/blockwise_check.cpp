// Random products with activations rounded by segments: the code of one instruction set, -D CHECKED=blockwise_amx or another, against plain C++, bit for bit.   blockwise_check FIRST_SEED COUNT
#include <algorithm>
#include <utility>
#include <vector>

#include "blockwise_case.h"
#include "seeds.h"

using namespace qforge;

namespace {

// Segments and rows where what is rounded and what is multiplied is cut in two
struct Cuts {
    int64_t segment, row, tile;
};

std::vector<float> product(const BlockwiseFunctions &f, const Weight &w, const std::vector<float> &x, int64_t rows, const Cuts &cuts) {
    const auto whole = static_cast<size_t>((rows + 15) / 16 * 16), inputs = static_cast<size_t>(w.inputs()), segments = static_cast<size_t>(w.blocks * segments_of_block(w));
    std::vector<int8_t> codes(whole * inputs * 2);
    std::vector<float> scales(whole * segments), sums(whole * static_cast<size_t>(w.blocks), NAN), group_scales(whole * segments), y(static_cast<size_t>(rows * w.columns), -1.0f);
    std::vector<int32_t> offsets(whole * segments * 2);
    std::vector<CenteredSegment> centered(whole * segments);
    std::vector<PairedSegment> pairs(whole * segments);
    const RoundedBlocks rounded{codes.data(), scales.data(), sums.data(), group_scales.data(), offsets.data(), centered.data(), pairs.data(), rows};
    f.round_rows(w, x.data(), w.inputs(), rounded, 0, rows, 0, cuts.segment);
    f.round_rows(w, x.data() + first_input(w, cuts.segment), w.inputs(), rounded, 0, rows, cuts.segment, w.blocks * segments_of_block(w));
    const int64_t size = f.scratch_bytes ? f.scratch_bytes(w) : 0;
    const Room scratch = room(size + 64), untouched = room(64);
    CacheAhead nothing;
    for (const auto &[row, row_end] : {std::pair(int64_t{0}, cuts.row), std::pair(cuts.row, rows)})
        for (const auto &[tile, tile_end] : {std::pair(int64_t{0}, cuts.tile), std::pair(cuts.tile, w.tiles())})
            if (row < row_end && tile < tile_end) f.piece({&w, rounded, y.data(), w.columns, row, row_end, tile, tile_end, &nothing}, scratch.get());
    if (std::memcmp(static_cast<char *>(scratch.get()) + size, untouched.get(), 64) != 0) std::fill(y.begin(), y.end(), INFINITY);  // written past its end
    return y;
}

bool same(unsigned seed) {
    BlockwiseCase c(seed);
    const Weight &w = c.w;
    const int64_t unit = w.zero < 0 || w.block_k % segment_inputs(w) ? segments_of_block(w) : 1, segments = w.blocks * segments_of_block(w);  // where rounding may begin
    const int64_t row = CHECKED.tile_rows == 16 || c.below(2) ? c.below(5) * 16 : c.below(c.rows);  // where a task begins: with AMX whole groups of 16 rows, else anywhere
    const Cuts cuts{c.below(segments / unit) * unit, std::min(c.rows, row), c.below(w.tiles() / 2 + 1) * 2};
    return c.same(seed, product(blockwise_portable, w, c.x, c.rows, {0, c.rows, w.tiles()}), product(CHECKED, w, c.x, c.rows, cuts));
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
