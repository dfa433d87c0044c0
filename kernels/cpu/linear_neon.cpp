// The linear for ARM's vectors of 4 floats. Order of sums: linear.h. A block of 16 columns is unpacked once into a panel in the first-level cache, over which groups of rows pass; what one row takes so is about what unpacking takes.
#include <arm_neon.h>

#include <algorithm>

#include "qforge/linear.h"

namespace qforge {
namespace {

constexpr int kVectors = 4;  // of 4 columns: a tile
constexpr int kRows = 4;     // 16 sums, 4 vectors of values and 4 of inputs in 32 registers

// ---- unpacking: 8 inputs x 16 columns ----

// What makes values of a block's codes
struct Key {
    uint8x16_t zeros{};
    uint8x16x4_t book{};  // the first bytes of its 16 floats, the second ones, ...
};

inline void put_halves(uint16x8_t bits, float factor, float *to) {
    vst1q_f32(to, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits))), factor));
    vst1q_f32(to + 4, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(bits))), factor));
}

// One input whose codes are bytes
template <Format F>
inline void put_codes(uint8x16_t codes, const Key &key, float *to) {
    if constexpr (F == Format::BOOK4) {
        uint8x16x4_t bytes;
        for (int b = 0; b < 4; ++b) bytes.val[b] = vqtbl1q_u8(key.book.val[b], codes);
        vst4q_u8(reinterpret_cast<uint8_t *>(to), bytes);
    } else if constexpr (F == Format::E4M3) {  // a half whose exponent is 8 too small
        const auto half_bits = [](uint16x8_t v) { return vorrq_u16(vshlq_n_u16(vandq_u16(v, vdupq_n_u16(0x80)), 8), vshlq_n_u16(vandq_u16(v, vdupq_n_u16(0x7F)), 7)); };
        put_halves(half_bits(vmovl_u8(vget_low_u8(codes))), 256.0f, to);
        put_halves(half_bits(vmovl_high_u8(codes)), 256.0f, to + 8);
    } else {
        const int16x8_t lower = vreinterpretq_s16_u16(vsubl_u8(vget_low_u8(codes), vget_low_u8(key.zeros))), upper = vreinterpretq_s16_u16(vsubl_high_u8(codes, key.zeros));
        vst1q_f32(to, vcvtq_f32_s32(vmovl_s16(vget_low_s16(lower))));
        vst1q_f32(to + 4, vcvtq_f32_s32(vmovl_high_s16(lower)));
        vst1q_f32(to + 8, vcvtq_f32_s32(vmovl_s16(vget_low_s16(upper))));
        vst1q_f32(to + 12, vcvtq_f32_s32(vmovl_high_s16(upper)));
    }
}

template <Format F>
inline void unpack_chunk(const uint8_t *chunk, const Key &key, float *to) {
    if constexpr (F == Format::F16 || F == Format::BF16) {
        for (int i = 0; i < 8 * kTile; i += 8) {
            const uint16x8_t bits = vld1q_u16(reinterpret_cast<const uint16_t *>(chunk) + i);
            if constexpr (F == Format::F16) {
                put_halves(bits, 1.0f, to + i);
            } else {
                vst1q_f32(to + i, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)));
                vst1q_f32(to + i + 4, vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16)));
            }
        }
    } else {
        constexpr bool nibbles = F == Format::INT4 || F == Format::BOOK4;
        const uint8x16x4_t first = vld4q_u8(chunk), second = nibbles ? first : vld4q_u8(chunk + 64);  // inputs apart, all 16 columns of one together
        for (int j = 0; j < 4; ++j) {
            put_codes<F>(nibbles ? vandq_u8(first.val[j], vdupq_n_u8(15)) : first.val[j], key, to + j * kTile);
            put_codes<F>(nibbles ? vshrq_n_u8(second.val[j], 4) : second.val[j], key, to + (j + 4) * kTile);
        }
    }
}

// The values of a block of a tile, [block_k][16], in `room` or where they are already
template <Format F>
const float *unpack_block(const Weight &w, int64_t at, float *room) {
    const int64_t chunks = w.block_k / 8;
    const uint8_t *chunk = w.codes + at * chunks * chunk_bytes(F);
    if constexpr (F == Format::F32) return reinterpret_cast<const float *>(chunk);
    Key key;
    if constexpr (F == Format::INT4 || F == Format::INT8) key.zeros = vld1q_u8(w.zeros + at * kTile);
    if constexpr (F == Format::BOOK4) key.book = vld4q_u8(reinterpret_cast<const uint8_t *>(w.book));
    for (int64_t c = 0; c < chunks; ++c) unpack_chunk<F>(chunk + c * chunk_bytes(F), key, room + c * 8 * kTile);
    return room;
}

// ---- product ----

// parts of R rows += input J of 4 * values
template <int J, int R>
inline __attribute__((always_inline)) void add_input(float32x4_t (&part)[R][kVectors], const float32x4_t (&x)[R], const float *values) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const float32x4_t w = vld1q_f32(values + J * kTile + 4 * v);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) part[r][v] = vfmaq_laneq_f32(part[r][v], w, x[r], J);
    }
}

// totals [R rows][kWideTiles * kTile] of one tile += one block, whose values are `panel`
template <int R>
void multiply(const float *x, int64_t x_stride, const float *panel, int64_t block_k, const float *scales, float *totals) {
    float32x4_t part[R][kVectors] = {};
    for (int64_t k = 0; k < block_k; k += 4, panel += 4 * kTile) {
        float32x4_t four[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) four[r] = vld1q_f32(x + r * x_stride + k);
        add_input<0>(part, four, panel);
        add_input<1>(part, four, panel);
        add_input<2>(part, four, panel);
        add_input<3>(part, four, panel);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) {
            float *total = totals + r * kWideTiles * kTile + 4 * v;
            vst1q_f32(total, scales ? vfmaq_f32(vld1q_f32(total), vld1q_f32(scales + 4 * v), part[r][v]) : vaddq_f32(vld1q_f32(total), part[r][v]));
        }
}

template <int R = kRows>
void multiply_rows(int64_t rows, const float *x, int64_t x_stride, const float *panel, int64_t block_k, const float *scales, float *totals) {
    if constexpr (R > 1)
        if (rows < R) return multiply_rows<R - 1>(rows, x, x_stride, panel, block_k, scales, totals);
    multiply<R>(x, x_stride, panel, block_k, scales, totals);
}

// At most kRowChunk rows and kWideTiles tiles
template <Format F>
void strip(const Piece &p, float *scratch) {
    const Weight &w = *p.weight;
    const int64_t rows = p.row_end - p.row;
    float *totals = scratch, *room = scratch + kRowChunk * kWideTiles * kTile;
    std::fill_n(totals, rows * kWideTiles * kTile, 0.0f);
    for (int64_t b = 0; b < w.blocks; ++b)
        for (int64_t t = 0; t < p.tile_end - p.tile; ++t) {
            const int64_t at = (p.tile + t) * w.blocks + b;
            const float *panel = unpack_block<F>(w, at, room), *scales = w.scales ? w.scales + at * kTile : nullptr;
            for (int64_t r = 0; r < rows; r += kRows) multiply_rows(rows - r, p.x + (p.row + r) * p.x_stride + b * w.block_k, p.x_stride, panel, w.block_k, scales, totals + (r * kWideTiles + t) * kTile);
        }
    const int64_t column = p.tile * kTile, columns = std::min(w.columns, p.tile_end * kTile) - column;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) p.y[(p.row + r) * p.y_stride + column + c] = w.bias ? totals[r * kWideTiles * kTile + c] + w.bias[column + c] : totals[r * kWideTiles * kTile + c];
}

template <Format F>
void strips(const Piece &p, float *scratch) {
    for (int64_t row = p.row; row < p.row_end; row += kRowChunk)
        for (int64_t tile = p.tile; tile < p.tile_end; tile += kWideTiles)
            strip<F>({p.weight, p.x, p.y, p.x_stride, p.y_stride, row, std::min(row + kRowChunk, p.row_end), tile, std::min(tile + kWideTiles, p.tile_end)}, scratch);
}

}  // namespace

void linear_neon(const Piece &piece, float *scratch) {
    switch (piece.weight->format) {
        case Format::INT4: return strips<Format::INT4>(piece, scratch);
        case Format::INT8: return strips<Format::INT8>(piece, scratch);
        case Format::F32: return strips<Format::F32>(piece, scratch);
        case Format::F16: return strips<Format::F16>(piece, scratch);
        case Format::BF16: return strips<Format::BF16>(piece, scratch);
        case Format::BOOK4: return strips<Format::BOOK4>(piece, scratch);
        case Format::E4M3: return strips<Format::E4M3>(piece, scratch);
    }
}

}  // namespace qforge
