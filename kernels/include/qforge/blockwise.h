// y = round(x) W^T (+ bias) for packed INT4 and INT8 weights (linear.h), with activations rounded on the fly in segments: to 8 bits (fast), or to 16 (accurate).
//
// Rounding. A block of the weight is cut into segments of 32 inputs, or of 64 around a middle for 8 bits times INT4 weights (the last may be shorter).
//   Segments of 32. With largest magnitude m, and most = 127 (8 bits) or 32512 (16):
//     scale = m / most;  code = round to nearest, ties to even, of x * (most / m).  Where m < 2^-100 scale and codes are 0.
//     A 16-bit code is kept as two bytes, code = 256 * high + low with low in [-128, 127], each of which multiplies weights by itself.
//   Segments of 64. With the largest value h and the smallest l, half = max(h / 2 - l / 2, max(|h|, |l|) / 32):
//     scale = half / 119.875 without the last two of its 24 bits;  code = round of x * (119.875 / half);  middle = round of (h / 2 + l / 2) * (119.875 / half).  Where half < 2^-100 scale, codes and middle are 0.
//     |code| < 2^12; what is kept is code - middle, from -120 to 120, and the middle.
//   Where an input is no number or infinite (in segments of 64: or half >= 2^110), scale = NaN, codes and middle are 0.
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
#include "qforge/half.h"
#include "qforge/linear.h"

namespace qforge {

constexpr int64_t kSegment = 32;   // |sum| of 16-bit codes times bytes stays below 2^28
constexpr int64_t kCentered = 64;  // inputs of a segment around a middle; |sum| stays below 2^22
constexpr float kCenteredMost = 119.875f;  // 120, and room for the rounding of two products: bytes hold the sum of a code and one of 4 bits
constexpr float kCenteredLeast = 0x1p-5f;  // half, of the largest magnitude
constexpr float kCenteredHuge = 0x1p110f;

// A sum that starts with kMagicBits has the bits of kMagic + sum as a float, so that fma(scale, that, -(scale * kMagic)), where the scale's 22 bits make scale * kMagic exact, is scale * (float) sum: one instruction in the place of two.
constexpr float kMagic = 0x1.8p23f;
constexpr int32_t kMagicBits = 0x4B400000;

inline bool centered(const Weight &w) { return w.format == Format::INT4 && w.activations == Activations::INT8; }
inline int64_t segment_inputs(const Weight &w) { return centered(w) ? kCentered : kSegment; }
inline int64_t segments_of_block(const Weight &w) { return (w.block_k + segment_inputs(w) - 1) / segment_inputs(w); }
inline int64_t first_input(const Weight &w, int64_t segment) { return segment / segments_of_block(w) * w.block_k + segment % segments_of_block(w) * segment_inputs(w); }
inline bool one_segment(const Weight &w) { return centered(w) && w.block_k == kCentered; }  // a block
inline int32_t first_bits(const Weight &w) { return one_segment(w) ? kMagicBits : 0; }      // of its sums
inline int64_t limbs(const Weight &w) { return w.activations == Activations::INT16 ? 2 : 1; }  // bytes of a code

// Sums of a tile's codes, which middles multiply
inline int64_t tile_sums(const Weight &w) { return w.blocks * segments_of_block(w) * kTile; }
inline const int16_t *code_sums_of(const Weight &w, int64_t tile) { return w.code_sums + tile * tile_sums(w); }

[[maybe_unused]] static float scale_at(const Weight &w, int64_t at) { return w.half_scales ? half_to_float(w.half_scales[at]) : w.scales[at]; }

inline float without_last_bits(float scale) { return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, scale) & ~3u); }

struct Extremes {  // of a segment: bits of floats, changed so that they rise as integers with the values
    int32_t high, low;
};

struct CodeSums {  // of a segment
    int32_t all, high;  // of codes; of their high bytes, or of codes where they have one byte
};

struct CenteredSegment {
    float scale;
    union {
        float magic;     // scale * kMagic
        int32_t starts;  // with AVX2, whose sums are narrow
    };
    int32_t offset;      // - zero * sum of whole codes, where there is one zero point; kMagicBits more where a block is one segment, with AVX-512
    int32_t middle;      // in the lower 16 bits; 1 in the upper ones
};

// Products by pairs (blockwise_avx512_pairs.cpp)
constexpr int kFirstMore = 120, kSecondLess = 8;  // what is added to the codes of a chunk's first half and taken from those of its second
constexpr int kPairsMiddle = 28140;               // of a column's correction term, from -3,840 to 60,120

// Whether a chunk of a segment in even or odd tiles is multiplied plainly: far from a segment's ends, which have multiplications enough
constexpr bool plain_chunk(int odd, int64_t chunk) { return odd ? chunk == 3 || chunk == 5 : chunk == 1 || chunk == 6; }

struct PairedSegment {
    float scale, magic;
    int32_t middle, starts[2];  // what sums start with in even and in odd tiles
};

// Narrow sums: of a segment around a middle in 16 bits (AVX2), each of two of every four inputs, so of 32 at most. They start with -8 times the sum of these inputs' codes (`starts`: of the first two inputs in the lower 16 bits, of the others above) and
// are at each step the sum of code * (weight code - 8) over what was added, less 8 * code over what is still to come: each of 32 inputs counts 120 * 8 at most, so that they never leave 16 bits. (Weights' codes of 0 to 15 by themselves would, after 18.)
// The middle multiplies the sum of the weights' codes less kNarrowSum; `offset` is what is left of zero points then.
constexpr int32_t kNarrowLess = 8, kNarrowSum = kNarrowLess * static_cast<int32_t>(kCentered);
inline bool narrow_without_offset(const Weight &w) { return w.zero == kNarrowLess && w.block_k % kCentered == 0; }  // offsets are 0

struct RoundedBlocks {  // codes, sums, group_scales and centered can be read up to whole groups of 16 rows, where a task begins
    int8_t *codes;              // [rows][limbs][inputs()], the high byte first; with AVX2, where there is no middle, int16 [rows][inputs()] (words_256.inl); for products by pairs changed by kFirstMore and kSecondLess
    float *scales;              // [rows][blocks][segments_of_block], of segments that have no middle
    float *sums;                // [rows][blocks], where zero points differ
    float *group_scales;        // [(rows + 15) / 16][blocks][segments_of_block][16]: scales once more, for tiles of 16 rows
    int32_t *offsets;           // [rows][blocks][segments_of_block][limbs]: - zero * sum of those bytes, where there is one zero point, of segments that have no middle
    CenteredSegment *centered;  // [rows][blocks][segments_of_block], of those that have one
    PairedSegment *pairs;       // [rows][blocks][segments_of_block], once more
    int64_t rows;               // of the whole product: of so many, codes may be kept for products by pairs
};

// Segments that are rounded one after the other, `count` of them from one of a row on: those after it in the row, or the same ones of the rows after it
struct Walk {
    int64_t row, segment, count;
    bool down;
};

// All of them: down the rows where so few are wanted of each that they would not be rounded by fours
template <typename F>
void each_walk(const Weight &w, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end, const F &run) {
    if (segment_end - segment < 4 && w.block_k % segment_inputs(w) == 0)
        for (int64_t s = segment; s < segment_end; ++s) run(Walk{row, s, row_end - row, true});
    else
        for (; row < row_end; ++row) run(Walk{row, segment, segment_end - segment, false});
}

struct BlockwisePiece {
    const Weight *weight;
    RoundedBlocks rounded;
    float *y;
    int64_t y_stride, row, row_end, tile, tile_end;
    CacheAhead *cache;  // the thread's own
};

struct BlockwiseFunctions {
    // Segments [segment, segment_end) of rows [row, row_end); x: the first of these inputs in the first of these rows. Those of a block whose zero points differ are rounded in order; where a block is no whole number of segments, they begin with one.
    void (*round_rows)(const Weight &weight, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end);
    void (*piece)(const BlockwisePiece &piece, void *scratch);  // scratch: scratch_bytes(weight) bytes, 64-byte aligned, the thread's own
    int64_t tile_rows, most_rows;                               // rows that a task should have, or a multiple, up to so many
    int64_t (*scratch_bytes)(const Weight &weight);             // null: none
    bool in_registers;                                          // whether tasks may as well have half of the rows of a step of 32, since weights are unpacked for each few rows anew (pairs: 16 and 20 rows by halves take 3 % more)
};

extern const BlockwiseFunctions blockwise_portable;
extern const BlockwiseFunctions blockwise_avx2;
extern const BlockwiseFunctions blockwise_avx_vnni;
extern const BlockwiseFunctions blockwise_avx512_vnni;
extern const BlockwiseFunctions blockwise_avx512_pairs;
extern const BlockwiseFunctions blockwise_amx;
extern const BlockwiseFunctions blockwise_neon;

}  // namespace qforge
