// Products with activations rounded by segments (blockwise.h), written once for the instruction sets of x86. The file that includes this gives
//   largest_bits(x, inputs): the bits of the largest magnitude; round_segment<bytes of a code>(x, inputs, inverse, high bytes, low bytes) -> CodeSums;
//   largest_bits_of_four(x, bits): the same for four whole segments, one after the other; round_four(x, inverses, bytes, sums): their codes of one byte, or false where it leaves them to round_segment;
//   V: 16 columns side by side (sums_x86.inl), V::Floats; V::kCodeRows<F, bytes of a code>: code rows that its registers hold.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "qforge/blockwise.h"
#include "sums_x86.inl"

namespace qforge {
namespace {

// ---- rounding ----

static_assert(sizeof(CodeSums) == 8);  // round_four stores two at once
constexpr int64_t kAtOnce = 64;  // segments: what one of them waits for (its largest magnitude, a division) is found for many before the next step

// The segments of a row, one after the other
struct Segments {
    int64_t block_k, first = 0, left = block_k;  // first: input of the next one; left: inputs of its block from there on

    int64_t inputs() const { return std::min(kSegment, left); }
    void next(int64_t inputs) {
        first += inputs;
        left -= inputs;
        if (left == 0) left = block_k;
    }
};

template <int L>
void round_row(const Weight &w, const float *x, int8_t *high, int8_t *low, float *scales, float *sums, int32_t *offsets) {
    constexpr uint32_t kInfinity = 0x7F800000;  // NaNs' bits are larger
    constexpr float most = L == 2 ? 32512.0f : 127.0f;
    const int64_t in_block = segments_of_block(w), count = w.blocks * in_block;
    const bool whole = w.block_k % kSegment == 0;  // all of one length, as if the row were one block
    Segments measured{whole ? w.inputs() : w.block_k}, rounded = measured;
    float sum = 0;
    for (int64_t done = 0, last = in_block - 1; done < count; done += kAtOnce) {
        const int64_t here = std::min(kAtOnce, count - done), fours = whole ? here / 4 * 4 : 0;
        uint32_t bits[kAtOnce];
        float inverse[kAtOnce];
        CodeSums codes[kAtOnce];
        for (int64_t i = 0; i < fours; i += 4, measured.next(4 * kSegment)) largest_bits_of_four(x + measured.first, bits + i);
        for (int64_t i = fours; i < here; ++i, measured.next(measured.inputs())) bits[i] = largest_bits(x + measured.first, measured.inputs());
        for (int64_t i = 0; i < here; ++i) {
            const float m = __builtin_bit_cast(float, bits[i]);
            const bool finite = bits[i] < kInfinity, has_codes = finite && m >= 0x1p-100f;
            scales[done + i] = has_codes ? m / most : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
            inverse[i] = has_codes ? most / m : 0.0f;
        }
        for (int64_t i = 0; i < here;) {
            const int64_t first = rounded.first;
            if (L == 1 && i + 4 <= fours && round_four(x + first, inverse + i, high + first, codes + i)) {
                rounded.next(4 * kSegment);
                i += 4;
            } else {
                codes[i] = round_segment<L>(x + first, rounded.inputs(), inverse[i], high + first, L == 2 ? low + first : nullptr);
                rounded.next(rounded.inputs());
                ++i;
            }
        }
        for (int64_t i = 0; i < here; ++i) {
            *offsets++ = -w.zero * codes[i].high;
            if (L == 2) *offsets++ = -w.zero * (codes[i].all - 256 * codes[i].high);
        }
        if (w.zero >= 0) continue;
        for (int64_t i = 0; i < here; ++i) {
            sum = __builtin_fmaf(scales[done + i], static_cast<float>(codes[i].all), sum);
            if (done + i != last) continue;
            *sums++ = sum;
            sum = 0;
            last += in_block;
        }
    }
}

template <int L>
void round_rows_of(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &out, int64_t row, int64_t row_end) {
    const int64_t inputs = w.inputs(), segments = w.blocks * segments_of_block(w);
    for (int64_t r = row; r < row_end; ++r) {
        int8_t *high = out.codes + r * L * inputs;
        round_row<L>(w, x + r * x_stride, high, L == 2 ? high + inputs : nullptr, out.scales + r * segments, out.sums + r * w.blocks, out.offsets + r * segments * L);
    }
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end) {
    limbs(w) == 2 ? round_rows_of<2>(w, x, x_stride, rounded, row, row_end) : round_rows_of<1>(w, x, x_stride, rounded, row, row_end);
}

// ---- product ----

// part = fma(scale of the row's segment, sum, part) for R rows x T tiles; First: part = scale * sum, as if part were 0
template <Format F, int L, bool Z, bool First, int R, int T>
inline __attribute__((always_inline)) void add_segment(V::Floats (&part)[R][T], const V::Sums (&sum)[R * L][kSums<F, T>], const float *scales, const int32_t *offsets, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const float scale = scales[r * stride];
        const int32_t *offset = offsets + r * stride * L;
        for (int t = 0; t < T; ++t) {
            auto whole = V::whole<F>(&sum[r * L][t * V::kParts<F>], Z ? offset[0] : 0);
            if constexpr (L == 2) whole = V::join(whole, V::whole<F>(&sum[r * L + 1][t * V::kParts<F>], Z ? offset[1] : 0));
            const V::Floats by = V::spread(scale), value = V::to_floats(whole);
            part[r][t] = First ? V::multiply(by, value) : V::fma(by, value, part[r][t]);
        }
    }
}

template <Format F, int L, bool Z>
struct Product {
    static constexpr int kLimbs = L, kMost = V::kCodeRows<F, L> / L;
    const BlockwisePiece &p;
    Ahead codes_ahead{}, scales_ahead{};

    explicit Product(const BlockwisePiece &piece) : p(piece) {}
    void begin(int64_t strip, int64_t strip_end, int64_t rows, int64_t groups) {
        codes_ahead = codes_after(*p.weight, strip, strip_end, rows, groups);
        scales_ahead = scales_after(*p.weight, strip, strip_end, rows, groups);
    }

    template <int R, int T>
    void compute(int64_t row, int64_t tile) {
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), segments = segments_of_block(w), stride = w.blocks * segments;
        const int8_t *x = p.rounded.codes + row * L * inputs;
        const float *scale = p.rounded.scales + row * stride, *row_sum = p.rounded.sums + row * w.blocks;
        const int32_t *offset = p.rounded.offsets + row * stride * L;
        const uint8_t *chunk[T];
        V::Floats total[R][T];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) total[r][t] = V::spread(0);
        for (int t = 0; t < T; ++t) chunk[t] = w.codes + (tile + t) * inputs / 8 * chunk_bytes(F);
        for (int64_t b = 0; b < w.blocks; ++b) {
            codes_ahead.fetch();
            scales_ahead.fetch();
            p.cache->fetch(R * T * kTile * w.block_k);
            V::Floats part[R][T];
            if constexpr (!V::kAway)
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    for (int t = 0; t < T; ++t) part[r][t] = V::spread(0);
            for (int64_t left = w.block_k; left > 0; left -= kSegment, ++scale, offset += L) {
                V::put_away(total);
                if (left < w.block_k) V::put_away(part);
                V::Sums sum[R * L][kSums<F, T>];
                start_sums<F, L, Z, R * L, T>(sum, offset, stride * L);
                if (left >= kSegment) {  // apart, so that its loop has no end to look for
                    add_chunks<F, R * L, T>(sum, chunk, x, inputs, kSegment / 8);
                    x += kSegment;
                } else {
                    add_chunks<F, R * L, T>(sum, chunk, x, inputs, left / 8);
                    x += left;
                }
                if (V::kAway && left == w.block_k) add_segment<F, L, Z, true, R, T>(part, sum, scale, offset, stride);
                else add_segment<F, L, Z, false, R, T>(part, sum, scale, offset, stride);
            }
            for (int t = 0; t < T; ++t) {
                const int64_t at = ((tile + t) * w.blocks + b) * kTile;
                const V::Floats weight_scale = V::load(w.scales + at);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    if constexpr (!Z) part[r][t] = V::fma_minus(V::zeros(w.zeros + at), V::spread(row_sum[r * w.blocks + b]), part[r][t]);
                    total[r][t] = V::fma(weight_scale, part[r][t], total[r][t]);
                }
            }
        }
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
            const int64_t column = (tile + t) * kTile;
            for (int r = 0; r < R; ++r) V::store(p.y + (row + r) * p.y_stride + column, total[r][t], w.bias ? w.bias + column : nullptr, w.columns - column);
        }
    }
};

template <Format F, int L>
void any_zeros(const BlockwisePiece &p) { p.weight->zero < 0 ? all_rows<Product<F, L, false>>(p) : all_rows<Product<F, L, true>>(p); }

void piece(const BlockwisePiece &p, void *) {
    if (p.weight->format == Format::INT4)
        limbs(*p.weight) == 2 ? any_zeros<Format::INT4, 2>(p) : any_zeros<Format::INT4, 1>(p);
    else
        limbs(*p.weight) == 2 ? any_zeros<Format::INT8, 2>(p) : any_zeros<Format::INT8, 1>(p);
}

}  // namespace
}  // namespace qforge
