// The integer product in plain C++, for any CPU: the second implementation that the fast ones are tested against, bit for bit (integer.h).
#include "qforge/integer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace qforge {
namespace {

void round_rows(const RoundedRows &rows, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) {
        const float *x = rows.x + r * rows.x_stride;
        int16_t *codes = static_cast<int16_t *>(rows.codes) + r * rows.width;
        float largest = 0;
        bool finite = true;
        for (int64_t i = 0; i < rows.width; ++i) {
            finite = finite && std::isfinite(x[i]);
            largest = std::max(largest, std::fabs(x[i]));
        }
        float scale = rows.static_scale != 0 ? rows.static_scale : largest / 127.5f;
        if (scale == 0) scale = 1;
        rows.scales[r] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
        for (int64_t i = 0; i < rows.width; ++i) codes[i] = finite ? static_cast<int16_t>(std::clamp(std::nearbyint(x[i] / scale), -128.0f, 127.0f)) : int16_t{0};
    }
}

int weight_code(const Weight &w, const uint8_t *chunk, int j, int column) {
    if (w.format == Format::INT4) return (chunk[column * 4 + j % 4] >> (j / 4 * 4)) & 15;
    return chunk[j / 4 * 64 + column * 4 + j % 4];
}

void one_tile(const IntegerPiece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t chunks = w.block_k / 8, bytes = chunk_bytes(w.format);
    const int16_t *x = static_cast<const int16_t *>(p.codes) + row * w.inputs();
    float total[kTile] = {};
    int32_t sum[kTile] = {};
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t at = tile * w.blocks + b;
        for (int64_t c = 0; c < chunks; ++c)
            for (int j = 0; j < 8; ++j)
                for (int n = 0; n < kTile; ++n) sum[n] += x[b * w.block_k + c * 8 + j] * (weight_code(w, w.codes + (at * chunks + c) * bytes, j, n) - w.zeros[at * kTile + n]);
        if ((b + 1) % w.run) continue;
        for (int n = 0; n < kTile; ++n) {
            total[n] = std::fma(w.scales[at * kTile + n], static_cast<float>(sum[n]), total[n]);
            sum[n] = 0;
        }
    }
    for (int64_t n = 0; n < kTile && tile * kTile + n < w.columns; ++n) {
        const int64_t column = tile * kTile + n;
        const float scaled = total[n] * p.scales[row];
        p.y[row * p.y_stride + column] = w.bias ? scaled + w.bias[column] : scaled;
    }
}

void piece(const IntegerPiece &p, void *) {
    for (int64_t row = p.row; row < p.row_end; ++row)
        for (int64_t tile = p.tile; tile < p.tile_end; ++tile) one_tile(p, row, tile);
}

}  // namespace

constinit const IntegerFunctions integer_portable = {round_rows, piece, 1, kRowChunk, nullptr, false, 2};

}  // namespace qforge
