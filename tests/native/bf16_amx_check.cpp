// Random products in bf16, with gates and without: AMX's code on emulated tiles against plain C++, bit for bit.   bf16_amx_check FIRST_SEED COUNT
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "qforge/bf16.h"
#include "room.h"
#include "seeds.h"

using namespace qforge;

namespace {

Room rows_of(int64_t rows, int64_t count) { return room((rows + kGroupRows - 1) / kGroupRows * count * kTileValues * 2); }

struct Case {
    Weight w;
    std::vector<float> x;
    int64_t rows, cut;  // rows, and those of a task
};

Bf16Rows in(const Room &r) { return {static_cast<uint16_t *>(r.get())}; }

// In tasks of some rows and some tiles; gate: of the next product's inputs, or null
void product(const Bf16Functions &f, const Case &c, float *y, const Bf16Gate *gate) {
    const int64_t tiles = gate ? c.w.tiles() / 2 : c.w.tiles();
    const Room x = rows_of(c.rows, stretches(c.w)), scratch = room(bf16_scratch(c.w));
    f.round_rows(c.w, c.x.data(), c.w.inputs(), in(x), 0, c.rows, 0, stretches(c.w));
    for (int64_t row = 0; row < c.rows; row += c.cut)
        for (int64_t tile = 0; tile < tiles; tile += 4) f.piece({&c.w, in(x), y, c.w.columns, row, std::min(row + c.cut, c.rows), tile, std::min(tile + 4, tiles), gate}, scratch.get());
}

bool equal(float a, float b) { return std::memcmp(&a, &b, sizeof(float)) == 0 || (std::isnan(a) && std::isnan(b)); }

bool same(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    constexpr int64_t lengths[] = {64, 64, 128, 32, 96, 72, 192, 8};
    constexpr Format formats[] = {Format::INT4, Format::INT4, Format::INT8, Format::BOOK4};
    const bool gated = below(2), sliced = below(12) == 0;  // so many inputs and rows that inputs are cut into 2 or 3 slices, wherever blocks begin
    const int64_t columns = gated ? 2 * kTile * (1 + below(sliced ? 2 : 5)) : 1 + below(sliced ? 60 : 120), length = lengths[below(8)], inputs = sliced ? 6600 + below(5800) : 0;
    Case c{{formats[below(4)], columns, std::max(1 + below(7), inputs / length), length, 1, nullptr, nullptr, nullptr, nullptr, nullptr, Activations::BF16}, {}, sliced ? 81 + below(30) : 1 + below(100), kGroupRows * (sliced ? 6 : 1 + below(5))};
    Weight &w = c.w;
    const int64_t count = w.tiles() * w.blocks * kTile;
    std::vector<uint8_t> codes(static_cast<size_t>(w.tiles() * w.inputs() / 8 * chunk_bytes(w.format))), zeros(static_cast<size_t>(count));
    std::vector<float> scales(static_cast<size_t>(count)), book(16), bias(static_cast<size_t>(columns));
    for (uint8_t &code : codes) code = static_cast<uint8_t>(random());
    for (uint8_t &z : zeros) z = static_cast<uint8_t>(below(w.format == Format::INT8 ? 256 : 16));
    if (w.format != Format::BOOK4 && below(2)) {
        w.zero = zeros[0];
        std::fill(zeros.begin(), zeros.end(), zeros[0]);
    }
    for (float &s : scales) s = static_cast<float>(1 + below(1000)) * 1e-5f;
    for (float &b : book) b = static_cast<float>(below(2001) - 1000) * 1e-3f;
    for (float &b : bias) b = static_cast<float>(below(2001) - 1000) * 1e-2f;
    w.codes = codes.data();
    w.scales = scales.data();
    w.zeros = zeros.data();
    w.book = book.data();
    if (!gated && below(3) == 0) w.bias = bias.data();
    c.x.resize(static_cast<size_t>(c.rows * w.inputs()));
    for (float &v : c.x) v = static_cast<float>(below(20001) - 10000) / 5000.0f;
    if (below(5) == 0) c.x[static_cast<size_t>(below(static_cast<int64_t>(c.x.size())))] = NAN;
    std::vector<float> wanted(static_cast<size_t>(c.rows * columns), -1.0f), got = wanted;
    product(bf16_portable, c, wanted.data(), nullptr);
    const auto differs = [&](const char *what, int64_t row, int64_t column, float plain, float tiles) {
        std::printf("seed %u, %s: %d x %d in tasks of %d, %d blocks of %d, format %d, row %d, column %d: %g in plain C++, %g by tiles\n", seed, what, static_cast<int>(c.rows), static_cast<int>(columns),
                    static_cast<int>(c.cut), static_cast<int>(w.blocks), static_cast<int>(w.block_k), static_cast<int>(w.format), static_cast<int>(row), static_cast<int>(column), plain, tiles);
        return false;
    };
    if (!gated) {
        product(bf16_amx, c, got.data(), nullptr);
        for (int64_t i = 0; i < c.rows * columns; ++i)
            if (!equal(wanted[static_cast<size_t>(i)], got[static_cast<size_t>(i)])) return differs("a product", i / columns, i % columns, wanted[static_cast<size_t>(i)], got[static_cast<size_t>(i)]);
        return true;
    }
    const int64_t width = columns / 2;
    Weight next{Format::INT4, 1, width / 8, 8, 1, nullptr, nullptr, nullptr, nullptr, nullptr, Activations::BF16};
    const Activation kind = below(2) ? Activation::SILU : Activation::GELU_TANH;
    std::vector<float> activated(static_cast<size_t>(c.rows * width));
    layers_portable.gate({wanted.data(), activated.data(), width, kind}, 0, c.rows);
    const Room plain = rows_of(c.rows, stretches(next)), tiles = rows_of(c.rows, stretches(next));
    bf16_portable.round_rows(next, activated.data(), width, in(plain), 0, c.rows, 0, stretches(next));
    const Bf16Gate gate{kind, in(tiles), stretches(next)};
    product(bf16_amx, c, nullptr, &gate);
    for (int64_t row = 0; row < c.rows; ++row)
        for (int64_t i = 0; i < stretches(next) * kStretch; ++i) {
            const int64_t at = i / kStretch * kTileValues + i % kStretch;
            const auto value = [&](const Room &r) {  // of 0, the sign is lost in any sum
                const uint32_t bits = static_cast<uint32_t>(in(r).at(row, stretches(next))[at]) << 16;
                float v;
                std::memcpy(&v, &bits, 4);
                return v;
            };
            if (!equal(value(plain), value(tiles)) && value(plain) != value(tiles)) return differs("gates", row, i, value(plain), value(tiles));
        }
    return true;
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
