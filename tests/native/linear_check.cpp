// Random products of packed weights with fp32 activations: the code of one instruction set, -D CHECKED=linear_neon or another, against plain C++, bit for bit.   linear_check FIRST_SEED COUNT
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "qforge/linear.h"
#include "room.h"
#include "seeds.h"

using namespace qforge;

namespace {

std::vector<float> product(LinearPiece run, const Weight &w, const std::vector<float> &x, int64_t rows, int64_t row, int64_t tile) {
    std::vector<float> y(static_cast<size_t>(rows * w.columns), -1.0f);
    const Room scratch = room(scratch_floats(w) * static_cast<int64_t>(sizeof(float)));
    for (int64_t part = 0; part < 4; ++part)
        run({&w, x.data(), y.data(), w.inputs(), w.columns, part & 1 ? row : 0, part & 1 ? rows : row, part & 2 ? tile : 0, part & 2 ? w.tiles() : tile}, static_cast<float *>(scratch.get()));
    return y;
}

bool same(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    Weight w{static_cast<Format>(seed % 7), 1 + below(150), 1 + below(4), 8 * (1 + below(16)), 1, nullptr, nullptr, nullptr, nullptr, nullptr};
    const int64_t rows = below(4) ? 1 + below(12) : 1 + below(120), bytes = w.tiles() * w.inputs() / 8 * chunk_bytes(w.format), count = w.tiles() * w.blocks * kTile;
    const Room room_of_codes = room(bytes);
    auto *codes = static_cast<uint8_t *>(room_of_codes.get());
    const auto number = [&] { return static_cast<float>(below(2001) - 1000) * 1e-2f; };
    for (int64_t i = 0; i < bytes; ++i) codes[i] = static_cast<uint8_t>(random());
    if (w.format == Format::F32)
        for (int64_t i = 0; i < bytes / 4; ++i) {
            const float v = number();
            std::memcpy(codes + 4 * i, &v, 4);
        }
    for (int64_t i = 1; i < bytes; i += 2) {  // numbers near 1, and halves that are subnormal: infinities and NaNs would hide the others
        if (w.format == Format::F16) codes[i] &= 0xBF;
        if (w.format == Format::BF16) codes[i] = (codes[i] & 0x81) | 0x3E;
    }
    std::vector<float> scales(static_cast<size_t>(count)), book(16), bias(static_cast<size_t>(w.columns)), x(static_cast<size_t>(rows * w.inputs()));
    for (auto *floats : {&scales, &book, &bias, &x})
        for (float &v : *floats) v = number();
    std::vector<uint8_t> zeros(static_cast<size_t>(count));
    for (uint8_t &z : zeros) z = static_cast<uint8_t>(below(w.format == Format::INT8 ? 256 : 16));
    w.codes = codes;
    w.book = book.data();
    if (w.format != Format::F32 && w.format != Format::F16 && w.format != Format::BF16) w.scales = scales.data();
    if (w.format == Format::INT4 || w.format == Format::INT8) w.zeros = zeros.data();
    if (below(2)) w.bias = bias.data();
    const auto wanted = product(linear_portable, w, x, rows, rows, w.tiles()), got = product(CHECKED, w, x, rows, below(rows + 1), below(w.tiles() + 1));
    for (size_t i = 0; i < wanted.size(); ++i)
        if (std::memcmp(&wanted[i], &got[i], sizeof(float)) != 0 && !(std::isnan(wanted[i]) && std::isnan(got[i]))) {
            std::printf("seed %u: %d x %d, block of %d, format %d, row %d, column %d: %g in plain C++, %g checked\n", seed, static_cast<int>(rows), static_cast<int>(w.columns), static_cast<int>(w.block_k),
                        static_cast<int>(w.format), static_cast<int>(i) / static_cast<int>(w.columns), static_cast<int>(i) % static_cast<int>(w.columns), wanted[i], got[i]);
            return false;
        }
    return true;
}

}  // namespace

int main(int, char **given) { return all_the_same(given, same); }
