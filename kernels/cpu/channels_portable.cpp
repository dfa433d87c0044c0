// Weights of 8 bits with a scale a column times 16-bit activations with a scale a row in plain C++, for any CPU: the second implementation that the fast one is tested against, bit for bit (channels.h).
#include <algorithm>
#include <cmath>
#include <limits>

#include "qforge/channels.h"

namespace qforge {

Channels channels_of(const Weight &w) {
    Channels made{std::vector<int16_t>(static_cast<size_t>(w.tiles() * w.blocks * kTile)), std::vector<float>(static_cast<size_t>(w.tiles() * kTile))};
    for (int64_t tile = 0; tile < w.tiles(); ++tile)
        for (int64_t n = 0; n < kTile; ++n) {
            const auto at = [&](int64_t block) { return static_cast<size_t>((tile * w.blocks + block) * kTile + n); };
            float most = 0;
            bool finite = true;
            for (int64_t b = 0; b < w.blocks; ++b) {
                const int zero = w.zeros[at(b)];
                finite = finite && std::isfinite(w.scales[at(b)]);
                most = std::max(most, std::fabs(w.scales[at(b)]) * static_cast<float>(std::max(zero, 15 - zero)));
            }
            const float scale = most / 127;
            const bool has_steps = finite && scale >= 0x1p-100f && std::isfinite(most);
            made.scales[static_cast<size_t>(tile * kTile + n)] = has_steps ? scale : finite && std::isfinite(most) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
            for (int64_t b = 0; b < w.blocks; ++b) made.steps[at(b)] = has_steps ? static_cast<int16_t>(std::nearbyint(256 * (w.scales[at(b)] / scale))) : int16_t{0};
        }
    return made;
}

namespace {

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedChannels &out, int64_t row, int64_t row_end) {
    constexpr float most = 32512;
    for (int64_t r = row; r < row_end; ++r) {
        const float *values = x + r * x_stride;
        float largest = 0;
        bool finite = true;
        for (int64_t i = 0; i < w.inputs(); ++i) {
            finite = finite && std::isfinite(values[i]);
            largest = std::max(largest, std::fabs(values[i]));
        }
        const bool has_codes = finite && largest >= 0x1p-100f;
        out.scales[r] = has_codes ? largest / most : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        const float inverse = has_codes ? most / largest : 0.0f;
        int8_t *to = out.at(r, stretches(w));
        for (int64_t i = 0; i < w.inputs(); ++i) {
            const int code = has_codes ? static_cast<int>(std::nearbyint(values[i] * inverse)) : 0, high = (code + 128) >> 8;
            int8_t *at = to + i / kStretch * kStretchBytes + i % kStretch;
            at[0] = static_cast<int8_t>(high);
            at[kTileBytes] = static_cast<int8_t>(code - 256 * high);
        }
    }
}

int weight(const Weight &w, int64_t tile, int64_t input, int64_t column) {
    const uint8_t *chunk = w.codes + (tile * w.inputs() + input) / 8 * chunk_bytes(w.format);
    if (w.format == Format::INT8) return chunk[input % 8 / 4 * 64 + column * 4 + input % 4] - 128;
    const int64_t at = (tile * w.blocks + input / w.block_k) * kTile + column;
    const int code = (chunk[column * 4 + input % 4] >> (input % 8 / 4 * 4)) & 15;
    return ((code - w.zeros[at]) * w.channels->steps[static_cast<size_t>(at)] + 128) >> 8;
}

void one_tile(const ChannelsPiece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int8_t *x = p.rounded.at(row, stretches(w));
    int32_t high[kTile] = {}, low[kTile] = {};
    for (int64_t i = 0; i < w.inputs(); ++i) {
        const int8_t *code = x + i / kStretch * kStretchBytes + i % kStretch;
        for (int64_t n = 0; n < kTile; ++n) {
            const int value = weight(w, tile, i, n);
            high[n] += value * code[0];
            low[n] += value * code[kTileBytes];
        }
    }
    for (int64_t n = 0; n < kTile && tile * kTile + n < w.columns; ++n) {
        const int64_t column = tile * kTile + n;
        const float sum = std::fma(256.0f, static_cast<float>(high[n]), static_cast<float>(low[n])), y = column_scales(w, tile)[n] * (p.rounded.scales[row] * sum);
        p.y[row * p.y_stride + column] = w.bias ? y + w.bias[column] : y;
    }
}

void piece(const ChannelsPiece &p, void *) {
    for (int64_t row = p.row; row < p.row_end; ++row)
        for (int64_t tile = p.tile; tile < p.tile_end; ++tile) one_tile(p, row, tile);
}

}  // namespace

constinit const ChannelsFunctions channels_portable = {round_rows, piece};

}  // namespace qforge
