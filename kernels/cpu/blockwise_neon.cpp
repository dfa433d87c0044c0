// Products with activations rounded by segments for ARM processors with dot products of bytes (compiled with that flag; called only where the system says that the CPU has them). `sdot` adds 4 products of signed bytes
// to a 32-bit lane: 4 inputs of a column by 4 of a row, which it takes from any quarter of a register. 4-bit codes are such bytes; from 8-bit ones 128 is taken away, and sums start with what that leaves out.
#include <arm_neon.h>

#include <algorithm>
#include <limits>

#include "qforge/blockwise.h"

namespace qforge {
namespace {

constexpr int kVectors = 4;   // of 4 columns: a tile
constexpr int kCodeRows = 4;  // 16 sums, 8 vectors of weights, and inputs: 32 registers hold that
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- rounding ----

struct Rounding {
    float scale, inverse;  // both 0, or NaN and 0: codes are 0
    int32_t middle = 0;
};

constexpr Rounding kNoNumber = {std::numeric_limits<float>::quiet_NaN(), 0};

// A vector's largest and smallest are NaN where one of its lanes is, and no comparison holds of NaN
inline Rounding rounding(const float *x, int64_t inputs, float most) {
    float32x4_t magnitude = vdupq_n_f32(0);
    for (int64_t i = 0; i < inputs; i += 4) magnitude = vmaxq_f32(magnitude, vabsq_f32(vld1q_f32(x + i)));
    const float largest = vmaxvq_f32(magnitude);
    if (!(largest < kInfinity)) return kNoNumber;
    if (largest < 0x1p-100f) return {0, 0};
    return {largest / most, most / largest};
}

inline Rounding centered_rounding(const float *x, int64_t inputs) {
    float32x4_t above = vld1q_f32(x), below = above;
    for (int64_t i = 4; i < inputs; i += 4) {
        above = vmaxq_f32(above, vld1q_f32(x + i));
        below = vminq_f32(below, vld1q_f32(x + i));
    }
    const float high = vmaxvq_f32(above), low = vminvq_f32(below);
    if (!(high < kInfinity && low > -kInfinity)) return kNoNumber;
    const float half = std::max(high * 0.5f - low * 0.5f, std::max(__builtin_fabsf(high), __builtin_fabsf(low)) * kCenteredLeast);
    if (half < 0x1p-100f) return {0, 0};
    if (half >= kCenteredHuge) return kNoNumber;
    const float inverse = kCenteredMost / half;
    return {without_last_bits(half / kCenteredMost), inverse, vcvtns_s32_f32((high * 0.5f + low * 0.5f) * inverse)};
}

// The bytes of L for each code of a segment, and the sums of each; where codes are 0 an input that is no number, times 0, becomes the integer 0
template <int L>
inline void round_segment(const float *x, int64_t inputs, const Rounding &to, int8_t *const (&bytes)[L], int32_t (&sums)[L]) {
    const int32x4_t middle = vdupq_n_s32(to.middle);
    int32x4_t sum[L] = {};
    for (int64_t i = 0; i < inputs; i += 8) {
        const auto codes = [&](int64_t at) { return vmovn_s32(vsubq_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + at), to.inverse)), middle)); };
        int16x8_t part[L];
        part[0] = vcombine_s16(codes(i), codes(i + 4));
        if constexpr (L == 2) {
            const int16x8_t upper = vshrq_n_s16(vaddq_s16(part[0], vdupq_n_s16(128)), 8);
            part[1] = vsubq_s16(part[0], vshlq_n_s16(upper, 8));
            part[0] = upper;
        }
        for (int l = 0; l < L; ++l) {
            sum[l] = vpadalq_s16(sum[l], part[l]);
            vst1_s8(bytes[l] + i, vmovn_s16(part[l]));
        }
    }
    for (int l = 0; l < L; ++l) sums[l] = vaddvq_s32(sum[l]);
}

// What sums of products start with, where the codes they multiply have this sum: the zero point that all weights have, and the 128
inline int32_t offset(const Weight &w, int32_t sum) { return ((w.format == Format::INT8 ? 128 : 0) - std::max(w.zero, 0)) * sum; }

// C: segments around a middle
template <int L, bool C>
void round_all(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &out, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    const int64_t inputs = w.inputs(), in_block = segments_of_block(w), start = first_input(w, segment);
    for (int64_t r = row; r < row_end; ++r, x += x_stride)
        for (int64_t s = segment; s < segment_end; ++s) {
            const int64_t first = first_input(w, s), length = std::min(segment_inputs(w), (s / in_block + 1) * w.block_k - first), at = r * w.blocks * in_block + s;
            const float *values = x + first - start;
            const Rounding to = C ? centered_rounding(values, length) : rounding(values, length, L == 2 ? 32512.0f : 127.0f);
            int8_t *bytes[L];
            for (int l = 0; l < L; ++l) bytes[l] = out.codes + (r * L + l) * inputs + first;
            int32_t sums[L];
            round_segment<L>(values, length, to, bytes, sums);
            if constexpr (C) {
                sums[0] += to.middle * static_cast<int32_t>(length);
                out.centered[at] = {to.scale, {to.scale * kMagic}, offset(w, sums[0]), 1 << 16 | (to.middle & 0xFFFF)};
            } else {
                out.scales[at] = to.scale;
                for (int l = 0; l < L; ++l) out.offsets[at * L + l] = offset(w, sums[l]);
            }
            if (w.zero >= 0) continue;
            float &sum = out.sums[at / in_block];
            sum = __builtin_fmaf(to.scale, static_cast<float>(L == 2 ? 256 * sums[0] + sums[L - 1] : sums[0]), s % in_block ? sum : 0.0f);
        }
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    const auto run = limbs(w) == 2 ? round_all<2, false> : centered(w) ? round_all<1, true> : round_all<1, false>;
    run(w, x, x_stride, rounded, row, row_end, segment, segment_end);
}

// ---- product ----

// 4 inputs of 16 columns: one half of a chunk
template <Format F>
inline void unpack(const uint8_t *chunk, int half, int8x16_t (&to)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const uint8x16_t bytes = vld1q_u8(chunk + 16 * v + (F == Format::INT8 ? 64 * half : 0));
        to[v] = vreinterpretq_s8_u8(F == Format::INT8 ? veorq_u8(bytes, vdupq_n_u8(128)) : half ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
    }
}

// So many sums of a code row and 4 columns: one for each half of the chunks where few code rows would have them wait for themselves
template <int N>
constexpr int kSets = N <= 2 ? 2 : 1;

// Sums of products over `chunks` chunks of 8 inputs; code row n has its codes at x + n * stride. Always in line, so that sums stay in registers
template <Format F, int N>
inline __attribute__((always_inline)) void add_chunks(int32x4_t (&sum)[N][kSets<N>][kVectors], const uint8_t *chunk, const int8_t *x, int64_t stride, int64_t chunks) {
    for (int64_t i = 0; i < chunks; ++i, chunk += chunk_bytes(F), x += 8) {
        int8x16_t first[kVectors], second[kVectors];
        unpack<F>(chunk, 0, first);
        unpack<F>(chunk, 1, second);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const int8x8_t eight = vld1_s8(x + n * stride);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[n][0][v] = vdotq_lane_s32(sum[n][0][v], first[v], eight, 0);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[n][kSets<N> - 1][v] = vdotq_lane_s32(sum[n][kSets<N> - 1][v], second[v], eight, 1);
        }
    }
}

// part = fma(scale of the row's segment, sum, part) for R rows x 1 tile; at: where the first row's segment is among all, `stride` from one row to the next
template <Format F, int L, bool C, int R>
inline __attribute__((always_inline)) void add_segment(float32x4_t (&part)[R][kVectors], const RoundedBlocks &rounded, int64_t at, int64_t stride, const uint8_t *chunk, const int8_t *x, int64_t inputs, int64_t chunks, const int16_t *code_sums) {
    int32x4_t sum[R * L][kSets<R * L>][kVectors] = {};
#pragma GCC unroll 4
    for (int n = 0; n < R * L; ++n) {
        const int64_t segment = at + n / L * stride;
        for (auto &s : sum[n][0]) s = vdupq_n_s32(C ? rounded.centered[segment].offset : rounded.offsets[segment * L + n % L]);
    }
    add_chunks<F, R * L>(sum, chunk, x, inputs, chunks);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        const int64_t segment = at + r * stride;
        const float scale = C ? rounded.centered[segment].scale : rounded.scales[segment];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const auto of = [&](int n) { return kSets<R * L> == 2 ? vaddq_s32(sum[n][0][v], sum[n][kSets<R * L> - 1][v]) : sum[n][0][v]; };
            int32x4_t all = of(r * L);
            if constexpr (L == 2) all = vaddq_s32(vshlq_n_s32(all, 8), of(r * L + 1));
            if constexpr (C) all = vmlal_n_s16(all, vld1_s16(code_sums + 4 * v), static_cast<int16_t>(rounded.centered[segment].middle));
            part[r][v] = vfmaq_n_f32(part[r][v], vcvtq_f32_s32(all), scale);
        }
    }
}

// A row's total += weight scale * part, less what zero points that differ take away; at: where the block's 16 columns are in scales and zero points
inline void add_block(float32x4_t (&total)[kVectors], float32x4_t (&part)[kVectors], const Weight &w, int64_t at, float row_sum) {
    if (w.zero < 0) {
        const uint8x16_t zeros = vld1q_u8(w.zeros + at);
        const uint16x8_t halves[] = {vmovl_u8(vget_low_u8(zeros)), vmovl_u8(vget_high_u8(zeros))};
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const uint32x4_t zero = v % 2 ? vmovl_high_u16(halves[v / 2]) : vmovl_u16(vget_low_u16(halves[v / 2]));
            part[v] = vfmsq_f32(part[v], vcvtq_f32_u32(zero), vdupq_n_f32(row_sum));
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const float32x4_t scale = w.half_scales ? vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(w.half_scales + at + 4 * v))) : vld1q_f32(w.scales + at + 4 * v);
        total[v] = vfmaq_f32(total[v], scale, part[v]);
    }
}

inline void store(const BlockwisePiece &p, const float32x4_t (&total)[kVectors], int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t column = tile * kTile, columns = std::min<int64_t>(kTile, w.columns - column);
    float *y = p.y + row * p.y_stride + column, last[kTile];
    float *to = columns == kTile ? y : last;
    for (int v = 0; v < kVectors; ++v) vst1q_f32(to + 4 * v, total[v]);
    if (w.bias || to == last)
        for (int64_t c = 0; c < columns; ++c) y[c] = w.bias ? to[c] + w.bias[column + c] : to[c];
}

template <Format F, int L, bool C, int R>
void some_rows(const BlockwisePiece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t inputs = w.inputs(), stride = w.blocks * segments_of_block(w);
    const int8_t *x = p.rounded.codes + row * L * inputs;
    const uint8_t *chunk = chunks_of(w, tile);
    const int16_t *code_sums = C ? code_sums_of(w, tile) : nullptr;
    int64_t segment = row * stride;
    float32x4_t total[R][kVectors] = {};
    for (int64_t b = 0; b < w.blocks; ++b) {
        p.cache->fetch(R * kTile * w.block_k);
        float32x4_t part[R][kVectors] = {};
        for (int64_t left = w.block_k; left > 0; ++segment) {
            const int64_t length = std::min(left, C ? kCentered : kSegment);
            add_segment<F, L, C, R>(part, p.rounded, segment, stride, chunk, x, inputs, length / 8, code_sums);
            x += length;
            chunk += length / 8 * chunk_bytes(F);
            if (C) code_sums += kTile;
            left -= length;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) add_block(total[r], part[r], w, (tile * w.blocks + b) * kTile, w.zero < 0 ? p.rounded.sums[(row + r) * w.blocks + b] : 0.0f);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(p, total[r], row + r, tile);
}

template <Format F, int L, bool C, int R = kCodeRows / L>
void any_rows(const BlockwisePiece &p, int64_t rows, int64_t row, int64_t tile) {
    if constexpr (R > 1)
        if (rows < R) return any_rows<F, L, C, R - 1>(p, rows, row, tile);
    some_rows<F, L, C, R>(p, row, tile);
}

// Strips of tiles stay in a near cache while groups of rows, nearly equal ones, pass over them
template <Format F, int L, bool C>
void strips(const BlockwisePiece &p) {
    constexpr int64_t kMost = kCodeRows / L;
    for (int64_t first = p.tile; first < p.tile_end; first += kWideTiles) {
        const int64_t end = std::min(p.tile_end, first + kWideTiles);
        for (int64_t row = p.row, groups = (p.row_end - p.row + kMost - 1) / kMost; groups > 0; --groups) {
            const int64_t here = (p.row_end - row + groups - 1) / groups;
            for (int64_t tile = first; tile < end; ++tile) any_rows<F, L, C>(p, here, row, tile);
            row += here;
        }
    }
}

void piece(const BlockwisePiece &p, void *) {
    const Weight &w = *p.weight;
    if (centered(w)) return strips<Format::INT4, 1, true>(p);
    if (w.format == Format::INT4) return strips<Format::INT4, 2, false>(p);
    limbs(w) == 2 ? strips<Format::INT8, 2, false>(p) : strips<Format::INT8, 1, false>(p);
}

}  // namespace

constinit const BlockwiseFunctions blockwise_neon = {round_rows, piece, kCodeRows, kRowChunk, nullptr, true};

}  // namespace qforge
