// Products of bf16 in plain C++, for any CPU: the second implementation that the fast one is tested against, bit for bit (bf16.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "qforge/bf16.h"

namespace qforge {
namespace {

uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

float flushed(float v) { return std::fabs(v) < std::numeric_limits<float>::min() ? 0.0f : v; }

// x86 looks whether a result is subnormal after it rounded it to 24 bits: what becomes the smallest normal number because subnormals are coarser is 0.
float fma_flushed(float a, float b, float c) {
    constexpr double tiny = std::numeric_limits<float>::min(), rounds_to_it = tiny - 0x1p-151;
    const float v = std::fma(flushed(a), flushed(b), c);
    if (std::fabs(v) != static_cast<float>(tiny)) return flushed(v);
    return std::fabs(static_cast<double>(a) * b + c) < rounds_to_it ? 0.0f : v;
}

uint16_t nearest_even(float v) {
    const uint32_t bits = bits_of(flushed(v));
    if (std::isnan(v)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float cut(float v) { return float_of(bits_of(v) & 0xFFFF0000); }  // quiet NaNs stay NaN

float raised(Format f, float scale) { return std::isnan(scale) ? std::numeric_limits<float>::quiet_NaN() : float_of((bits_of(scale * raised_by(f)) + 0x1000) & 0xFFFFE000); }

void round_rows(const Weight &w, const float *x, int64_t x_stride, const Bf16Rows &to, int64_t row, int64_t row_end, int64_t first, int64_t end) {
    const int64_t inputs = w.inputs(), count = stretches(w);
    for (int64_t r = row; r < row_end; ++r)
        for (int64_t i = first * kStretch; i < end * kStretch; ++i) to.at(r, count)[i / kStretch * kTileValues + i % kStretch] = i < inputs ? nearest_even(x[r * x_stride + i]) : uint16_t{0};
}

float weight(const Weight &w, int64_t tile, int64_t input, int64_t column) {
    if (input >= w.inputs()) return 0;
    const uint8_t *chunk = w.codes + (tile * w.inputs() + input) / 8 * chunk_bytes(w.format);
    const int64_t at = (tile * w.blocks + input / w.block_k) * kTile + column;
    const int in_four = chunk[column * 4 + input % 4] >> (input % 8 / 4 * 4) & 15;
    const float scale = raised(w.format, w.scales[at]);
    if (w.format == Format::BOOK4) return cut(w.book[in_four] * scale);
    const int code = w.format == Format::INT8 ? chunk[input % 8 / 4 * 64 + column * 4 + input % 4] : in_four;
    const auto more = static_cast<float>(1 << mantissa_bits(w.format, input));
    return cut(std::fma(more + static_cast<float>(code), scale, 0.0f - (more + static_cast<float>(w.zeros[at])) * scale));
}

float one(const Bf16Piece &p, int64_t row, int64_t tile, int64_t column) {
    const int64_t count = stretches(*p.weight);
    const uint16_t *x = p.x.at(row, count);
    float total = 0;
    for (int64_t s = 0; s < count; ++s, x += kTileValues) {
        float sums[2] = {0, 0};  // even, odd
        for (int64_t i = 0; i < kStretch; ++i) sums[i % 2] = fma_flushed(float_of(static_cast<uint32_t>(x[i]) << 16), weight(*p.weight, tile, s * kStretch + i, column), sums[i % 2]);
        total = flushed(total + flushed(sums[0] + sums[1]));
    }
    return total;
}

void piece(const Bf16Piece &p, void *) {
    const Weight &w = *p.weight;
    for (int64_t row = p.row; row < p.row_end; ++row)
        for (int64_t column = p.tile * kTile; column < std::min(p.tile_end * kTile, w.columns); ++column) {
            const float y = one(p, row, column / kTile, column % kTile);
            p.y[row * p.y_stride + column] = w.bias ? y + w.bias[column] : y;
        }
}

}  // namespace

constinit const Bf16Functions bf16_portable = {round_rows, piece, false};

}  // namespace qforge
