// y = round(x) W^T (+ bias) for packed INT4 and INT8 weights (linear.h), with activations rounded on the fly in segments of 32 inputs: to 8 bits (fast), or to 16 (accurate).
//
// Rounding. A block of the weight is cut into segments of 32 inputs (the last may be shorter). For a segment with largest magnitude m, and most = 127 (INT8) or 32512 (INT16):
//   scale = m / most;  code = round to nearest, ties to even, of x * (most / m).  Where m < 2^-100 scale and codes are 0; where m is no number or infinite, scale = NaN and codes are 0.
//   A 16-bit code is kept as two bytes, code = 256 * high + low with low in [-128, 127], each of which multiplies weights by itself.
//   sum of a block = 0; for each segment: sum = fma(scale, (float) (sum of its codes), sum)
//
// Sums. For each output: total = 0; for each block: part = 0;
//   where all zero points of the weight are one number, for each segment: part = fma(scale, (float) (exact int32 sum of code * (weight code - zero)), part);
//   where they differ, for each segment: part = fma(scale, (float) (exact int32 sum of code * weight code), part);  then part = fma(-zero, sum of the block, part);
//   total = fma(weight scale, part, total);  and at last y = total (+ bias)
// so bits depend neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include <cstdint>

#include "qforge/cache_ahead.h"
#include "qforge/linear.h"

namespace qforge {

constexpr int64_t kSegment = 32;  // |sum| of 16-bit codes times bytes stays below 2^28; of one byte times 4-bit codes, by lanes of 8, below 2^15

inline int64_t segments_of_block(const Weight &w) { return (w.block_k + kSegment - 1) / kSegment; }
inline int64_t limbs(const Weight &w) { return w.activations == Activations::INT16 ? 2 : 1; }  // bytes of a code

struct CodeSums {  // of a segment
    int32_t all, high;  // of codes; of their high bytes, or of codes where they have one byte
};

struct RoundedBlocks {  // codes, sums and group_scales can be read up to whole groups of 16 rows, where a task begins
    int8_t *codes;        // [rows][limbs][inputs()], the high byte first
    float *scales;        // [rows][blocks][segments_of_block]
    float *sums;          // [rows][blocks], where zero points differ
    float *group_scales;  // [(rows + 15) / 16][blocks][segments_of_block][16]: scales once more, for tiles of 16 rows
    int32_t *offsets;     // [rows][blocks][segments_of_block][limbs]: - zero * sum of those bytes, where there is one zero point
};

struct BlockwisePiece {
    const Weight *weight;
    RoundedBlocks rounded;
    float *y;
    int64_t y_stride, row, row_end, tile, tile_end;
    CacheAhead *cache;  // the thread's own
};

struct BlockwiseFunctions {
    void (*round_rows)(const Weight &weight, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end);
    void (*piece)(const BlockwisePiece &piece, void *scratch);  // scratch: scratch_bytes(weight) bytes, 64-byte aligned, the thread's own
    int64_t tile_rows, most_rows;                               // rows that a task should have, or a multiple, up to so many
    int64_t (*scratch_bytes)(const Weight &weight);             // null: none
};

extern const BlockwiseFunctions blockwise_portable;
extern const BlockwiseFunctions blockwise_avx2;
extern const BlockwiseFunctions blockwise_avx_vnni;
extern const BlockwiseFunctions blockwise_avx512_vnni;
extern const BlockwiseFunctions blockwise_amx;

}  // namespace qforge
