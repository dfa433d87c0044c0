// y = round(x) W^T (+ bias), both sides integers: activations rounded to int8 by row, packed INT4 or INT8 weights (linear.h), sums of products exact in int32.
//
// Rounding of a row (qforge/numerics.py, `quantize_activations`): scale = largest magnitude / 127.5, or 1 if that is 0, or the given static scale;
// code = clamp(round to nearest, ties to even, of x / scale, -128, 127). A row that holds an infinity or a NaN gets a scale of NaN, and so gives NaN.
//
// Sums. For each output: total = 0; for each run of blocks (equal scales and zeros): sum = the exact int32 sum of code * (weight code - zero);
//   total = fma(weight scale, (float) sum, total); and at last y = total * row scale (+ bias)
// so that bits depend neither on the order of inputs, nor on other rows, threads, or the instruction set. A run has at most kLongestRun inputs.
#pragma once

#include <cstdint>

#include "qforge/cache_ahead.h"
#include "qforge/linear.h"

namespace qforge {

constexpr int64_t kLongestRun = 65536;  // * 128 * 255 is just below 2^31

struct RoundedRows {
    const float *x;
    int64_t x_stride, width;
    float static_scale;  // 0: each row has its own
    int64_t run;         // inputs of a run of blocks
    void *codes;         // [rows][width], of IntegerFunctions::code_bytes each
    float *scales;       // [rows]
    int32_t *sums;       // [rows][width / run]: of the codes; left alone where codes have two bytes
};

// As Piece, with the activations already rounded.
struct IntegerPiece {
    const Weight *weight;
    const void *codes;  // [*][inputs()]
    const float *scales;
    const int32_t *sums;
    float *y;
    int64_t y_stride, row, row_end, tile, tile_end;
    CacheAhead *cache;  // the thread's own
};

struct IntegerFunctions {
    void (*round_rows)(const RoundedRows &rows, int64_t first, int64_t end);
    void (*piece)(const IntegerPiece &piece, void *scratch);
    int64_t tile_rows, most_rows;  // this and the next as in BlockwiseFunctions
    int64_t (*scratch_bytes)(const Weight &weight);
    bool panels;  // cut as products in fp32 are (Context::cut_panels), whatever tile_rows and most_rows say
    int code_bytes;
};

extern const IntegerFunctions integer_portable;
extern const IntegerFunctions integer_avx2;
extern const IntegerFunctions integer_avx512_vnni;
extern const IntegerFunctions integer_amx;

}  // namespace qforge
