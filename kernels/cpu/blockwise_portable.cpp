// The product with activations rounded by segments in plain C++, for any CPU: the second implementation that the fast ones are tested against, bit for bit (blockwise.h).
#include <algorithm>
#include <cmath>
#include <limits>

#include "qforge/blockwise.h"

namespace qforge {
namespace {

struct Rounding {
    float scale, inverse;  // both 0: codes are 0
    int middle = 0;
};

Rounding rounding(const float *x, int64_t inputs, float most) {
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < inputs; ++i) {
        finite = finite && std::isfinite(x[i]);
        largest = std::max(largest, std::fabs(x[i]));
    }
    if (!finite) return {std::numeric_limits<float>::quiet_NaN(), 0};
    if (largest < 0x1p-100f) return {0, 0};
    return {largest / most, most / largest};
}

Rounding centered_rounding(const float *x, int64_t inputs) {
    float high = x[0], low = x[0];
    for (int64_t i = 0; i < inputs; ++i) {
        if (!std::isfinite(x[i])) return {std::numeric_limits<float>::quiet_NaN(), 0};
        high = std::max(high, x[i]);
        low = std::min(low, x[i]);
    }
    const float half = std::max(high * 0.5f - low * 0.5f, std::max(std::fabs(high), std::fabs(low)) * kCenteredLeast);
    if (half < 0x1p-100f) return {0, 0};
    if (half >= kCenteredHuge) return {std::numeric_limits<float>::quiet_NaN(), 0};
    const float inverse = kCenteredMost / half;
    return {without_last_bits(half / kCenteredMost), inverse, static_cast<int>(std::nearbyint((high * 0.5f + low * 0.5f) * inverse))};
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &out, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    const bool wide = w.activations == Activations::INT16;
    const int64_t inputs = w.inputs(), segments = segments_of_block(w), whole = segment_inputs(w);
    for (int64_t r = row; r < row_end; ++r) {
        int8_t *high = out.codes + r * limbs(w) * inputs, *low = high + inputs;
        for (int64_t s = segment; s < segment_end; ++s) {
            const int64_t b = s / segments, first = first_input(w, s), length = std::min(whole, (b + 1) * w.block_k - first), at = r * w.blocks * segments + s;
            const float *values = x + (r - row) * x_stride + first - first_input(w, segment);
            const Rounding to = centered(w) ? centered_rounding(values, length) : rounding(values, length, wide ? 32512.0f : 127.0f);
            int32_t codes[2] = {0, 0};  // of the high bytes, of the low ones
            for (int64_t i = 0; i < length; ++i) {
                const int code = to.inverse == 0 ? 0 : static_cast<int>(std::nearbyint(values[i] * to.inverse));
                high[first + i] = static_cast<int8_t>(wide ? (code + 128) >> 8 : code - to.middle);
                codes[0] += high[first + i] + to.middle;
                if (wide) low[first + i] = static_cast<int8_t>(code - 256 * high[first + i]);
                if (wide) codes[1] += low[first + i];
            }
            if (centered(w)) {
                out.centered[at] = {to.scale, {to.scale * kMagic}, -w.zero * codes[0], 1 << 16 | (to.middle & 0xFFFF)};
            } else {
                out.scales[at] = to.scale;
                for (int64_t l = 0; l < limbs(w); ++l) out.offsets[at * limbs(w) + l] = -w.zero * codes[l];
            }
            if (w.zero >= 0) continue;
            float &sum = out.sums[r * w.blocks + b];
            sum = std::fma(to.scale, static_cast<float>(wide ? 256 * codes[0] + codes[1] : codes[0]), s % segments ? sum : 0.0f);
        }
    }
}

int weight_code(const Weight &w, const uint8_t *chunk, int64_t j, int column) {
    if (w.format == Format::INT4) return (chunk[column * 4 + j % 4] >> (j / 4 * 4)) & 15;
    return chunk[j / 4 * 64 + column * 4 + j % 4];
}

void one_tile(const BlockwisePiece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const bool wide = w.activations == Activations::INT16;
    const int64_t chunks = w.block_k / 8, bytes = chunk_bytes(w.format), inputs = w.inputs(), segments = segments_of_block(w), whole = segment_inputs(w);
    const int8_t *high = p.rounded.codes + row * limbs(w) * inputs, *low = high + inputs;
    float total[kTile] = {};
    for (int64_t b = 0; b < w.blocks; ++b) {
        const int64_t at = tile * w.blocks + b;
        float part[kTile] = {};
        for (int64_t s = 0; s < segments; ++s) {
            int32_t sum[kTile] = {};
            const int64_t segment = (row * w.blocks + b) * segments + s;
            const int middle = centered(w) ? static_cast<int16_t>(p.rounded.centered[segment].middle) : 0;
            const float scale = centered(w) ? p.rounded.centered[segment].scale : p.rounded.scales[segment];
            for (int64_t k = s * whole; k < std::min(w.block_k, (s + 1) * whole); ++k) {
                const int64_t i = b * w.block_k + k;
                const int code = wide ? 256 * high[i] + low[i] : high[i] + middle;
                for (int n = 0; n < kTile; ++n) sum[n] += code * (weight_code(w, chunks_of(w, tile) + (b * chunks + k / 8) * bytes, k % 8, n) - std::max(w.zero, 0));
            }
            for (int n = 0; n < kTile; ++n) part[n] = std::fma(scale, static_cast<float>(sum[n]), part[n]);
        }
        for (int n = 0; n < kTile; ++n) {
            if (w.zero < 0) part[n] = std::fma(-static_cast<float>(w.zeros[at * kTile + n]), p.rounded.sums[row * w.blocks + b], part[n]);
            total[n] = std::fma(scale_at(w, at * kTile + n), part[n], total[n]);
        }
    }
    for (int64_t n = 0; n < kTile && tile * kTile + n < w.columns; ++n) {
        const int64_t column = tile * kTile + n;
        p.y[row * p.y_stride + column] = w.bias ? total[n] + w.bias[column] : total[n];
    }
}

void piece(const BlockwisePiece &p, void *) {
    for (int64_t row = p.row; row < p.row_end; ++row)
        for (int64_t tile = p.tile; tile < p.tile_end; ++tile) one_tile(p, row, tile);
}

}  // namespace

constinit const BlockwiseFunctions blockwise_portable = {round_rows, piece, 1, kRowChunk, nullptr, true};

}  // namespace qforge
