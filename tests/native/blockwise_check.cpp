// Random products with activations rounded by segments: the code of one instruction set, -D CHECKED=blockwise_amx or another, against plain C++, bit for bit.   blockwise_check FIRST_SEED COUNT
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "qforge/blockwise.h"
#include "room.h"
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
    std::vector<float> scales(whole * segments), sums(whole * static_cast<size_t>(w.blocks)), group_scales(whole * segments), y(static_cast<size_t>(rows * w.columns), -1.0f);
    std::vector<int32_t> offsets(whole * segments * 2);
    std::vector<CenteredSegment> centered(whole * segments);
    const RoundedBlocks rounded{codes.data(), scales.data(), sums.data(), group_scales.data(), offsets.data(), centered.data(), nullptr};
    f.round_rows(w, x.data(), w.inputs(), rounded, 0, rows, 0, cuts.segment);
    f.round_rows(w, x.data() + first_input(w, cuts.segment), w.inputs(), rounded, 0, rows, cuts.segment, w.blocks * segments_of_block(w));
    const Room scratch = room(f.scratch_bytes ? f.scratch_bytes(w) : 64);
    CacheAhead nothing;
    for (const auto &[row, row_end] : {std::pair(int64_t{0}, cuts.row), std::pair(cuts.row, rows)})
        for (const auto &[tile, tile_end] : {std::pair(int64_t{0}, cuts.tile), std::pair(cuts.tile, w.tiles())})
            if (row < row_end && tile < tile_end) f.piece({&w, rounded, y.data(), w.columns, row, row_end, tile, tile_end, &nothing}, scratch.get());
    return y;
}

// Multiples of a half with the extremes of a segment for which one unit is one code: ties
void halves(const Weight &w, std::vector<float> &x) {
    const float most = centered(w) ? kCenteredMost : w.activations == Activations::INT16 ? 32512.0f : 127.0f;
    for (size_t i = 0; i < x.size(); ++i) {
        const auto in_segment = static_cast<int64_t>(i) % w.block_k % segment_inputs(w);
        x[i] = in_segment == 0 ? most : in_segment == 1 ? -most : std::floor(x[i] / 2.4f) + 0.5f;
    }
}

bool same(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    constexpr int64_t lengths[] = {64, 64, 128, 32, 96, 72, 192, 8};
    Weight w{below(3) ? Format::INT4 : Format::INT8, 1 + below(80), 1 + below(7), lengths[below(8)], 1, nullptr, nullptr, nullptr, nullptr, nullptr, below(3) ? Activations::INT8 : Activations::INT16};
    const int64_t rows = 1 + below(70), most = w.format == Format::INT8 ? 256 : 16, count = w.tiles() * w.blocks * kTile;
    const Room codes = room(w.tiles() * tile_bytes(w));
    auto *bytes = static_cast<uint8_t *>(codes.get());
    for (int64_t i = 0; i < w.tiles() * tile_bytes(w); ++i) bytes[i] = static_cast<uint8_t>(random());
    w.codes = bytes;
    for (int64_t t = 0; centered(w) && t < w.tiles(); ++t) {
        auto *sums = const_cast<int16_t *>(code_sums_of(w, t));
        std::memset(sums, 0, static_cast<size_t>(code_sums_bytes(w)));
        for (int64_t k = 0; k < w.inputs(); ++k)
            for (int64_t c = 0; c < kTile; ++c)
                sums[(k / w.block_k * segments_of_block(w) + k % w.block_k / kCentered) * kTile + c] += static_cast<int16_t>(chunks_of(w, t)[k / 8 * 64 + c * 4 + k % 4] >> (k % 8 / 4 * 4) & 15);
    }
    std::vector<float> scales(static_cast<size_t>(count)), x(static_cast<size_t>(rows * w.inputs()));
    for (float &s : scales) s = static_cast<float>(below(1000)) * 1e-5f;
    std::vector<uint8_t> zeros(static_cast<size_t>(count), static_cast<uint8_t>(most / 2));
    w.zero = static_cast<int>(most / 2);
    if (below(2)) {
        w.zero = -1;
        for (uint8_t &z : zeros) z = static_cast<uint8_t>(below(most));
    }
    w.scales = scales.data();
    w.zeros = zeros.data();
    const float middle = below(3) ? 0.0f : static_cast<float>(below(200) - 100);
    for (float &v : x) v = static_cast<float>(below(20001) - 10000) / 500.0f + middle;
    if (below(6) == 0) halves(w, x);
    if (below(5) == 0) x[static_cast<size_t>(below(static_cast<int64_t>(x.size())))] = below(2) ? NAN : below(2) ? INFINITY : -INFINITY;
    constexpr float factors[] = {0.0f, 0x1p-115f, 0x1p-104f, 0x1p105f};  // what has no codes, or hardly any, and what is too large around a middle
    if (const int64_t factor = below(8); factor < 4)
        for (size_t i = 0; i < x.size() / 2; ++i) x[i] *= factors[factor];
    std::vector<float> bias(static_cast<size_t>(w.columns));
    for (float &b : bias) b = static_cast<float>(below(2001) - 1000) * 1e-2f;
    if (below(3) == 0) w.bias = bias.data();
    // Rounding that is cut begins with a block; tasks begin at whole groups of 16 rows
    const Cuts cuts{below(w.blocks) * segments_of_block(w), std::min(rows, below(5) * 16), below(w.tiles() / 2 + 1) * 2};
    const auto wanted = product(blockwise_portable, w, x, rows, {0, rows, w.tiles()}), got = product(CHECKED, w, x, rows, cuts);
    for (size_t i = 0; i < wanted.size(); ++i)
        if (std::memcmp(&wanted[i], &got[i], sizeof(float)) != 0 && !(std::isnan(wanted[i]) && std::isnan(got[i]))) {
            std::printf("seed %u: %d x %d, block of %d, format %d, activations %d, zero %d, row %d, column %d: %g in plain C++, %g checked\n", seed, static_cast<int>(rows), static_cast<int>(w.columns),
                        static_cast<int>(w.block_k), static_cast<int>(w.format), static_cast<int>(w.activations), w.zero, static_cast<int>(i) / static_cast<int>(w.columns),
                        static_cast<int>(i) % static_cast<int>(w.columns), wanted[i], got[i]);
            return false;
        }
    return true;
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
