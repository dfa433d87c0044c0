// y = bf16(x) bf16(W)^T (+ bias) for packed weights (linear.h), summed in fp32 from the first input to the last: what AMX's tiles multiply.
//
// Activations. bf16: the nearest, ties to even; subnormals become 0, NaNs stay NaN.
// Weights, in fp32. scale' = scale * raised_by(format), then 11 significant bits: the nearest, ties away from zero.  INT4, INT8: value = fma(2^k + code, scale', 0 - (2^k + zero) * scale') with
//   k = mantissa_bits(format, input), which is (code - zero) * scale'.  BOOK4: value = book[code] * scale', rounded once.  Then bf16: what lies past its bits is cut off. A scale that is NaN makes them NaN.
//   To cut off what was made a little larger is to round, to the greater magnitude from .16 to .73 of the way between two numbers on, by where they lie, right in the mean, and what bf16 has stays;
//   rounding to the nearest takes an addition for each weight, a fifth of what weights of few rows cost.
// Sums. For every 32 inputs (those past the last are 0), with products and sums as single fused operations in fp32, subnormals taken and given as 0:
//   even = odd = 0;  for each pair of them, in order: even = fma(x[2 i], w[2 i], even), odd = fma(x[2 i + 1], w[2 i + 1], odd);  total = total + (even + odd)
// which is how TDPBF16PS is defined (Intel's Software Developer's Manual, volume 2); y = total (+ bias).
// So bits depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "qforge/layers.h"
#include "qforge/linear.h"

namespace qforge {

constexpr int64_t kGroupRows = 16, kStretch = 32;            // rows and inputs of a tile of AMX
constexpr int64_t kTileValues = kGroupRows * kStretch;       // of activations or weights
constexpr int64_t kSumsFloats = 4 * kGroupRows * kTile;      // of four tiles

// Of a block's input; what shifts cost least (bf16_amx.cpp). 2^k * scale' has to be finite.
constexpr int mantissa_bits(Format f, int64_t input) {
    constexpr int kInt4[8] = {12, 4, 8, 8, 8, 12, 4, 4};
    return f == Format::INT8 ? 8 : kInt4[input % 8];
}

// Cut off, numbers lose .72 * 2^-8 of themselves in the mean; codes of 4 bits times 11 bits less, since there is less to cut off.
constexpr float raised_by(Format f) { return f == Format::INT4 ? 1.0026f : 1.0028f; }

inline int64_t stretches(const Weight &w) { return (w.inputs() + kStretch - 1) / kStretch; }

struct Bf16Rows {
    uint16_t *values;  // [(rows + 15) / 16][stretches][16 rows][32 inputs], 64-byte aligned

    uint16_t *at(int64_t row, int64_t stretches) const { return values + row / kGroupRows * stretches * kTileValues + row % kGroupRows * kStretch; }
};

// What becomes of products before they are stored: the first half of the columns are gates of the second half, and the results are rounded for the next product.
struct Bf16Gate {
    Activation activation;
    Bf16Rows to;
    int64_t stretches;  // of the next product; what lies past the last input becomes 0
};

struct Bf16Piece {
    const Weight *weight;
    Bf16Rows x;
    float *y;
    int64_t y_stride, row, row_end, tile, tile_end;
    const Bf16Gate *gate;  // null; or tiles are those of the first half, whole ones, without bias, and nothing goes to y
};

struct Bf16Functions {
    // stretches [first, end) of rows
    void (*round_rows)(const Weight &weight, const float *x, int64_t x_stride, const Bf16Rows &to, int64_t row, int64_t row_end, int64_t first, int64_t end);
    void (*piece)(const Bf16Piece &piece, void *scratch);  // scratch: bf16_scratch(weight) bytes, 64-byte aligned, the thread's own
    bool gates;  // whether it takes pieces with a gate
};

// Most rows of a task: the more share unpacked weights, the less these cost, while activations, or a slice of their inputs, stay in a second cache of 2 MiB beside panels.
constexpr int64_t kNearBytes = 1 << 20, kSlicedRows = 256;
inline int64_t row_bytes(const Weight &w) { return stretches(w) * kStretch * 2; }
inline int64_t bf16_rows(const Weight &w) { return std::clamp<int64_t>(kNearBytes / row_bytes(w) / (2 * kGroupRows), kSlicedRows / (2 * kGroupRows), 16) * 2 * kGroupRows; }

// Slices that inputs are cut into: sums are put away between them, of so many tiles at a time.
constexpr int64_t kSlicedTiles = 16;
inline int64_t bf16_slices(const Weight &w, int64_t rows) { return rows > 2 * kGroupRows && w.block_k % kStretch == 0 ? (rows * row_bytes(w) + kNearBytes - 1) / kNearBytes : 1; }

// Two tiles of weights, twice sums of four tiles, and sums that are put away
inline int64_t bf16_scratch(const Weight &w) { return 2 * stretches(w) * kTileValues * 2 + (2 + kSlicedTiles / 2 * kSlicedRows / (2 * kGroupRows)) * kSumsFloats * 4; }

extern const Bf16Functions bf16_portable;
extern const Bf16Functions bf16_amx;

}  // namespace qforge
