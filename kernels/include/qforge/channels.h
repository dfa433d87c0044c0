// y = round(x) W8^T (+ bias) for packed weights (linear.h), with activations rounded to 16 bits that have one scale a row, and weights of 8 bits that have one scale a column.
// Nothing is scaled before all inputs are summed: AMX's tiles hold their sums from the first input to the last, where blockwise.h takes them out every 32 inputs.
//
// Weights. INT8: one scale a column (the first block's counts), zero points of 128; weight = code - 128.
//   INT4: brought to 8 bits as they are multiplied.  reach = max(zero, 15 - zero);  scale of a column = largest |scale of a block| * reach / 127;
//   step of a block = round(256 * scale of the block / scale of the column), an int16;  weight = (code - zero) * step / 256, rounded to the nearest, ties up.
//   A scale that is no number or infinite makes the column's scale NaN and its steps 0. A product reads 2 bytes a block and column for its steps, not 4 for its scales.
// Rounding. As blockwise.h's to 16 bits, a whole row as one segment: code = 256 * high + low.
// Sums. high, low = exact int32 sums of weight * byte over all inputs;  y = scale of the column * (scale of the row * fma(256, (float) high, (float) low)) (+ bias)
// so bits depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include <cstdint>

#include "qforge/linear.h"

namespace qforge {

constexpr int64_t kGroupRows = 16, kStretch = 64;                                       // rows and inputs of a tile of AMX
constexpr int64_t kTileBytes = kGroupRows * kStretch, kStretchBytes = 2 * kTileBytes;  // of codes: one byte of each, both
constexpr int64_t kChannelRows = 256;                                                  // most rows of a task: the more share unpacked weights, the less these cost
constexpr int64_t kMostChannelInputs = (1 << 17) - 8;                                  // 128 * 128 * so many stay below 2^31

inline int64_t stretches(const Weight &w) { return (w.inputs() + kStretch - 1) / kStretch; }

struct RoundedChannels {
    int8_t *codes;  // [(rows + 15) / 16][stretches][high, low][16 rows][64 inputs], 64-byte aligned; inputs past the last are 0
    float *scales;  // [rows]
    int32_t *sums;  // [rows][high, low]: -128 * sum of a row's bytes

    int8_t *at(int64_t row, int64_t stretches) const { return codes + row / kGroupRows * stretches * kStretchBytes + row % kGroupRows * kStretch; }
};

struct ChannelsPiece {
    const Weight *weight;
    RoundedChannels rounded;
    float *y;
    int64_t y_stride, row, row_end, tile, tile_end;
};

struct ChannelsFunctions {
    void (*round_rows)(const Weight &weight, const float *x, int64_t x_stride, const RoundedChannels &rounded, int64_t row, int64_t row_end);
    void (*piece)(const ChannelsPiece &piece, void *scratch);  // scratch: channels_scratch(weight) bytes, 64-byte aligned, the thread's own
};

// Four tiles of weights, a byte each
inline int64_t channels_scratch(const Weight &w) { return 4 * stretches(w) * kTileBytes; }

Channels channels_of(const Weight &weight);

// Scales of a tile's columns
inline const float *column_scales(const Weight &w, int64_t tile) { return w.channels ? w.channels->scales.data() + tile * kTile : w.scales + tile * w.blocks * kTile; }

extern const ChannelsFunctions channels_portable;
extern const ChannelsFunctions channels_amx;

}  // namespace qforge
