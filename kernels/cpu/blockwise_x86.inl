// Products with activations rounded by segments (blockwise.h), written once for the instruction sets of x86. The file that includes this gives
//   V: 16 columns side by side (sums_x86.inl), V::Floats; V::tiles(code rows) and V::kCodeRows<F, bytes of a code>: what its registers hold.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "qforge/blockwise.h"
#include "sums_x86.inl"

namespace qforge {
namespace {

// ---- rounding ----

struct Rounding {
    float scale, inverse;  // inverse 0: codes are 0
};

inline __m256i largest_lane(__m256i a) {
    a = _mm256_max_epu32(a, _mm256_permute2x128_si256(a, a, 1));
    a = _mm256_max_epu32(a, _mm256_shuffle_epi32(a, 0x4E));
    return _mm256_max_epu32(a, _mm256_shuffle_epi32(a, 0xB1));
}

inline int32_t sum_of_lanes(__m256i a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

inline Rounding rounding(const float *x, int64_t inputs, float most) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < inputs; i += 8) largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i)), magnitude));
    const __m128i bits = _mm256_castsi256_si128(largest_lane(largest));
    constexpr int kInfinity = 0x7F800000;  // NaNs' bits are larger
    if (_mm_cvtsi128_si32(bits) >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0};
    const float m = _mm_cvtss_f32(_mm_castsi128_ps(bits));
    if (m < 0x1p-100f) return {0, 0};
    return {m / most, most / m};
}

inline void store_bytes(int8_t *to, __m256i words) {
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packs_epi16(halves, halves));
}

struct CodeSums {
    int32_t all, high;  // of codes, of their high bytes (or of codes, where they have one byte)
};

// Rounds one segment
template <int L>
inline CodeSums round_segment(const float *x, int64_t inputs, float inverse, int8_t *high, int8_t *low) {
    const __m256 by = _mm256_set1_ps(inverse);
    __m256i sum = _mm256_setzero_si256(), high_sum = sum;
    for (int64_t i = 0; i < inputs; i += 8) {
        __m256i code = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
        if (inverse == 0) code = _mm256_setzero_si256();
        sum = _mm256_add_epi32(sum, code);
        if constexpr (L == 2) {
            const __m256i upper = _mm256_srai_epi32(_mm256_add_epi32(code, _mm256_set1_epi32(128)), 8);
            high_sum = _mm256_add_epi32(high_sum, upper);
            store_bytes(high + i, upper);
            store_bytes(low + i, _mm256_sub_epi32(code, _mm256_slli_epi32(upper, 8)));
        } else {
            store_bytes(high + i, code);
        }
    }
    const int32_t all = sum_of_lanes(sum);
    return {all, L == 2 ? sum_of_lanes(high_sum) : all};
}

template <int L>
void round_rows_of(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &out, int64_t row, int64_t row_end) {
    const int64_t inputs = w.inputs(), segments = segments_of_block(w);
    for (int64_t r = row; r < row_end; ++r) {
        int8_t *high = out.codes + r * L * inputs, *low = high + inputs;
        const float *values = x + r * x_stride;
        float *scale = out.scales + r * w.blocks * segments;
        int32_t *offset = out.offsets + r * w.blocks * segments * L;
        for (int64_t b = 0; b < w.blocks; ++b) {
            float sum = 0;
            for (int64_t left = w.block_k; left > 0; left -= kSegment) {
                const int64_t length = std::min(kSegment, left);
                const Rounding to = rounding(values, length, L == 2 ? 32512.0f : 127.0f);
                const CodeSums codes = round_segment<L>(values, length, to.inverse, high, low);
                *scale++ = to.scale;
                *offset++ = -w.zero * codes.high;
                if (L == 2) *offset++ = -w.zero * (codes.all - 256 * codes.high);
                sum = __builtin_fmaf(to.scale, static_cast<float>(codes.all), sum);
                values += length;
                high += length;
                low += length;
            }
            out.sums[r * w.blocks + b] = sum;
        }
    }
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end) {
    limbs(w) == 2 ? round_rows_of<2>(w, x, x_stride, rounded, row, row_end) : round_rows_of<1>(w, x, x_stride, rounded, row, row_end);
}

// ---- product ----

// part = fma(scale of the row's segment, sum, part) for R rows x T tiles
template <Format F, int L, bool Z, int R, int T>
inline __attribute__((always_inline)) void add_segment(V::Floats (&part)[R][T], const V::Sums<F> (&sum)[R * L][T], const float *scales, const int32_t *offsets, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const float scale = scales[r * stride];
        const int32_t *offset = offsets + r * stride * L;
        for (int t = 0; t < T; ++t) {
            auto whole = V::whole<F>(sum[r * L][t], Z ? offset[0] : 0);
            if constexpr (L == 2) whole = V::join(whole, V::whole<F>(sum[r * L + 1][t], Z ? offset[1] : 0));
            part[r][t] = V::fma(V::spread(scale), V::to_floats(whole), part[r][t]);
        }
    }
}

// R rows x T tiles
template <Format F, int L, bool Z, int R, int T>
void product(const BlockwisePiece &p, int64_t row, int64_t tile, Ahead &codes, Ahead &scales) {
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
        codes.fetch();
        scales.fetch();
        V::Floats part[R][T];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) part[r][t] = V::spread(0);
        for (int64_t left = w.block_k; left > 0; left -= kSegment, ++scale, offset += L) {
            V::Sums<F> sum[R * L][T];
            start_sums<F, L, Z>(sum, offset, stride * L);
            if (left >= kSegment) {  // apart, so that its loop has no end to look for
                add_chunks<F>(sum, chunk, x, inputs, kSegment / 8);
                x += kSegment;
            } else {
                add_chunks<F>(sum, chunk, x, inputs, left / 8);
                x += left;
            }
            add_segment<F, L, Z>(part, sum, scale, offset, stride);
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

// The product of `rows` <= R rows with the next tiles, and how many tiles that were
template <Format F, int L, bool Z, int R>
int64_t some_rows(int64_t rows, const BlockwisePiece &p, int64_t row, int64_t tile, int64_t tiles, Ahead &codes, Ahead &scales) {
    if constexpr (R > 1)
        if (rows < R) return some_rows<F, L, Z, R - 1>(rows, p, row, tile, tiles, codes, scales);
    constexpr int T = V::tiles(R * L);
    if (tiles < T) {
        product<F, L, Z, R, 1>(p, row, tile, codes, scales);
        return 1;
    }
    product<F, L, Z, R, T>(p, row, tile, codes, scales);
    return T;
}

// Strips of tiles stay in the second-level cache while groups of rows, nearly equal ones, pass over them.
template <Format F, int L, bool Z>
void all_rows(const BlockwisePiece &p) {
    const Weight &w = *p.weight;
    constexpr int kMost = V::kCodeRows<F, L> / L;
    for (int64_t strip = p.tile; strip < p.tile_end; strip += kWideTiles) {
        const int64_t strip_end = std::min(p.tile_end, strip + kWideTiles), groups = (p.row_end - p.row + kMost - 1) / kMost;
        Ahead codes = next_tiles(w, w.codes, w.inputs() / 8 * chunk_bytes(F), strip_end, p.row_end - p.row, groups);
        Ahead scales = next_tiles(w, reinterpret_cast<const uint8_t *>(w.scales), w.blocks * kTile * static_cast<int64_t>(sizeof(float)), strip_end, p.row_end - p.row, groups);
        for (int64_t row = p.row, left = groups; left > 0; --left) {
            const int64_t rows = (p.row_end - row + left - 1) / left;
            for (int64_t tile = strip; tile < strip_end;) tile += some_rows<F, L, Z, kMost>(rows, p, row, tile, strip_end - tile, codes, scales);
            row += rows;
        }
    }
}

template <Format F, int L>
void any_zeros(const BlockwisePiece &p) { p.weight->zero < 0 ? all_rows<F, L, false>(p) : all_rows<F, L, true>(p); }

void piece(const BlockwisePiece &p) {
    if (p.weight->format == Format::INT4)
        limbs(*p.weight) == 2 ? any_zeros<Format::INT4, 2>(p) : any_zeros<Format::INT4, 1>(p);
    else
        limbs(*p.weight) == 2 ? any_zeros<Format::INT8, 2>(p) : any_zeros<Format::INT8, 1>(p);
}

}  // namespace
}  // namespace qforge
