// y = x W^T (+ bias) with packed weights and fp32 activations: what a launcher takes, and the launchers of each instruction set.
//
// Layout. Columns (output features) come in tiles of 16, inputs in blocks of `block_k` (a multiple of 8); a block has one scale and one zero point a column.
//   codes   [tiles][blocks * block_k / 8][chunk]: a chunk is 8 inputs x 16 columns
//           INT4  64 bytes: [16 columns][4 bytes], byte j = code of input j | code of input j + 4 << 4         (the W4N16 order: a 32-bit lane is one column)
//           INT8 128 bytes: [2][16 columns][4 bytes], byte j of half h = code of input 4 h + j
//           BOOK4 as INT4, each code an index into `book`; E4M3 as INT8, each byte a float of 4 exponent and 3 mantissa bits (no NaN)
//           F32, F16, BF16: [8 inputs][16 columns]
//   scales  [tiles][blocks][16] fp32, null for F32, F16, BF16, and where half_scales are in their place; zeros [tiles][blocks][16] uint8, null but for INT4 and INT8
//   run     so many blocks one after the other have the same scales and zeros
//   Columns past `columns` are padding of any code; inputs past the real ones too: code = zero point (or 0.0), or any where x is 0.
//
// Sums. Every path of every instruction set computes, for each output, the same operations in the same order:
//   total = 0; for each block: part = 0; for each input of it, in order: part = fma(x, value, part); total = fma(scale, part, total) (dense: total + part)
//   with value = code - zero, or book[code], or what the float stands for
// so a row's result is equal bit for bit whatever other rows there are, however work is split among threads, and whichever instruction set runs it.
#pragma once

#include <cstdint>

namespace qforge {

enum class Format : int { INT4 = 0, INT8 = 1, F32 = 2, F16 = 3, BF16 = 4, BOOK4 = 5, E4M3 = 6 };

// What becomes of activations before they are multiplied: nothing, or rounding in segments of 32 or 64 inputs (blockwise.h; INT4 and INT8 weights only),
// or bf16, and weights with them (bf16.h; INT4, INT8 and BOOK4 weights).
enum class Activations : int { F32 = 0, INT8 = 1, INT16 = 2, BF16 = 3 };

constexpr int kTile = 16;       // columns of a tile
constexpr int kRowChunk = 96;   // rows of one task where there are many
constexpr int kWideTiles = 4;   // tiles of one strip, and of one task where there are many rows
constexpr int kFewRows = 4;     // up to here weights are read as one stream (and unpacked in registers by products that have panels for more, but for those by pairs)

constexpr int chunk_bytes(Format f) {
    switch (f) {
        case Format::INT4:
        case Format::BOOK4: return 64;
        case Format::INT8:
        case Format::E4M3: return 128;
        case Format::F32: return 512;
        default: return 256;
    }
}

constexpr bool has_zeros(Format f) { return f == Format::INT4 || f == Format::INT8; }

struct Weight {
    Format format;
    int64_t columns;
    int64_t blocks;
    int64_t block_k;
    int64_t run;
    const uint8_t *codes;
    const float *scales;
    const uint8_t *zeros;
    const float *book;  // [16] or null
    const float *bias;  // [columns] or null
    Activations activations = Activations::F32;
    int zero = -1;  // the zero point that all blocks of all columns have; -1 where they differ, or are not looked at
    const uint16_t *half_scales = nullptr;  // [tiles][blocks][16] fp16; for activations that are rounded (blockwise.h), where all scales are exact in it
    const int16_t *code_sums = nullptr;     // [tiles][segments of a row][16], where activations are rounded around a middle (blockwise.h)
    // The same with the column's correction term of the paired product (blockwise_avx512_pairs.cpp), or null: in the lower 16 bits the sum of codes; in the upper ones kPairsMiddle - the sum over pairs of inputs of kFirstMore w1 - kSecondLess w2
    // (and w1 w2, except in plain chunks), w1 and w2: codes at one place of a chunk's first and second half
    const int32_t *pair_sums = nullptr;

    int64_t tiles() const { return (columns + kTile - 1) / kTile; }
    int64_t inputs() const { return blocks * block_k; }
};

inline int64_t tile_bytes(const Weight &w) { return w.inputs() / 8 * chunk_bytes(w.format); }
inline const uint8_t *chunks_of(const Weight &w, int64_t tile) { return w.codes + tile * tile_bytes(w); }

// One piece of the product: rows [row, row_end) x tiles [tile, tile_end). x is [*, inputs()] with x_stride floats a row, y [*, columns] with y_stride.
struct Piece {
    const Weight *weight;
    const float *x;
    float *y;
    int64_t x_stride, y_stride, row, row_end, tile, tile_end;
};

using LinearPiece = void (*)(const Piece &piece, float *scratch);  // scratch: scratch_floats(weight) floats, 64-byte aligned, the thread's own

inline int64_t scratch_floats(const Weight &w) { return kWideTiles * kTile * (w.block_k + kRowChunk); }

void linear_portable(const Piece &piece, float *scratch);
void linear_avx2(const Piece &piece, float *scratch);
void linear_avx512(const Piece &piece, float *scratch);
void linear_neon(const Piece &piece, float *scratch);

}  // namespace qforge
