// The linear in plain C++, for any CPU: the second implementation that the fast ones are tested against, bit for bit. Order of sums: linear.h.
#include <cmath>
#include <cstring>

#include "qforge/half.h"
#include "qforge/linear.h"

namespace qforge {
namespace {

float e4m3_to_float(uint8_t v) {
    const int exponent = (v >> 3) & 15, mantissa = v & 7;
    const float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8, exponent - 7) : std::ldexp(static_cast<float>(mantissa), -9);
    return v & 128 ? -magnitude : magnitude;
}

// what input j of a chunk and one column stands for, before it is scaled
float unpack(const Weight &w, const uint8_t *chunk, int j, int column, int zero) {
    const Format format = w.format;
    if (format == Format::INT4 || format == Format::BOOK4) {
        const int code = (chunk[column * 4 + j % 4] >> (j / 4 * 4)) & 15;
        return format == Format::BOOK4 ? w.book[code] : static_cast<float>(code - zero);
    }
    if (format == Format::INT8) return static_cast<float>(chunk[j / 4 * 64 + column * 4 + j % 4] - zero);
    if (format == Format::E4M3) return e4m3_to_float(chunk[j / 4 * 64 + column * 4 + j % 4]);
    float f;
    if (format == Format::F32) {
        std::memcpy(&f, chunk + (j * kTile + column) * 4, 4);
        return f;
    }
    uint16_t h;
    std::memcpy(&h, chunk + (j * kTile + column) * 2, 2);
    if (format == Format::F16) return half_to_float(h);
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    std::memcpy(&f, &bits, 4);
    return f;
}

void one_tile(const Piece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t chunks = w.block_k / 8, bytes = chunk_bytes(w.format);
    const float *x = p.x + row * p.x_stride;
    float total[kTile] = {};
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t at = tile * w.blocks + b;
        float part[kTile] = {};
        for (int64_t c = 0; c < chunks; ++c)
            for (int j = 0; j < 8; ++j)
                for (int n = 0; n < kTile; ++n) {
                    const float v = unpack(w, w.codes + (at * chunks + c) * bytes, j, n, w.zeros ? w.zeros[at * kTile + n] : 0);
                    part[n] = std::fma(x[b * w.block_k + c * 8 + j], v, part[n]);
                }
        for (int n = 0; n < kTile; ++n) total[n] = w.scales ? std::fma(w.scales[at * kTile + n], part[n], total[n]) : total[n] + part[n];
    }
    for (int64_t n = 0; n < kTile && tile * kTile + n < w.columns; ++n) {
        const int64_t column = tile * kTile + n;
        p.y[row * p.y_stride + column] = w.bias ? total[n] + w.bias[column] : total[n];
    }
}

}  // namespace

void linear_portable(const Piece &piece, float *) {
    for (int64_t row = piece.row; row < piece.row_end; ++row)
        for (int64_t tile = piece.tile; tile < piece.tile_end; ++tile) one_tile(piece, row, tile);
}

}  // namespace qforge
