// The linear for AVX2 + FMA + F16C (compiled with those flags; called only where CPUID has them). Order of sums: linear.h.
#include <immintrin.h>

#include "qforge/linear.h"

namespace qforge {
namespace {

struct Columns {  // 16 columns of one input, or 16 partial sums
    __m256 lo, hi;
};

// What codes are read against: the zero points of 16 columns, or both halves of the book
struct Key {
    __m256i lo, hi;
};

constexpr bool has_zeros(Format f) { return f == Format::INT4 || f == Format::INT8; }

template <Format F>
inline Key load_key(const Weight &w, int64_t tile, int64_t block) {
    if constexpr (F == Format::BOOK4) return {_mm256_castps_si256(_mm256_loadu_ps(w.book)), _mm256_castps_si256(_mm256_loadu_ps(w.book + 8))};
    if constexpr (!has_zeros(F)) return {_mm256_setzero_si256(), _mm256_setzero_si256()};
    const uint8_t *z = w.zeros + (tile * w.blocks + block) * kTile;
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i *>(z));
    return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}

// code c at bits [kShift, kShift + 4) of each lane -> book[c]
template <int kShift>
inline __m256 look_up(__m256i lanes, const Key &book) {
    const __m256i index = _mm256_srli_epi32(lanes, kShift);  // of which permutes read three bits
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_castsi256_ps(book.lo), index), upper = _mm256_permutevar8x32_ps(_mm256_castsi256_ps(book.hi), index);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28 - kShift)));
}

// the e4m3 float at bits [kShift, kShift + 8) of each lane: its sign, exponent and mantissa where fp32 has them, and the difference of both exponents' biases
template <int kShift>
inline __m256 widen_e4m3(__m256i lanes) {
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(_mm256_slli_epi32(lanes, 24 - kShift), 4), _mm256_set1_epi32(static_cast<int>(0x87F00000u)));
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
}

// what input J of a chunk stands for before it is scaled, exact in fp32
template <Format F, int J>
inline Columns unpack(const uint8_t *chunk, const Key &key) {
    if constexpr (has_zeros(F)) {
        constexpr int kShift = F == Format::INT4 ? (J % 4) * 8 + (J / 4) * 4 : (J % 4) * 8;
        constexpr int kMask = F == Format::INT4 ? 15 : 255;
        const auto *p = reinterpret_cast<const __m256i *>(chunk + (F == Format::INT8 ? (J / 4) * 64 : 0));
        const __m256i mask = _mm256_set1_epi32(kMask);
        const __m256i lo = _mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(p), kShift), mask);
        const __m256i hi = _mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(p + 1), kShift), mask);
        return {_mm256_cvtepi32_ps(_mm256_sub_epi32(lo, key.lo)), _mm256_cvtepi32_ps(_mm256_sub_epi32(hi, key.hi))};
    } else if constexpr (F == Format::BOOK4) {
        constexpr int kShift = (J % 4) * 8 + (J / 4) * 4;
        const auto *p = reinterpret_cast<const __m256i *>(chunk);
        return {look_up<kShift>(_mm256_loadu_si256(p), key), look_up<kShift>(_mm256_loadu_si256(p + 1), key)};
    } else if constexpr (F == Format::E4M3) {
        constexpr int kShift = (J % 4) * 8;
        const auto *p = reinterpret_cast<const __m256i *>(chunk + (J / 4) * 64);
        return {widen_e4m3<kShift>(_mm256_loadu_si256(p)), widen_e4m3<kShift>(_mm256_loadu_si256(p + 1))};
    } else if constexpr (F == Format::F32) {
        const auto *p = reinterpret_cast<const float *>(chunk) + J * kTile;
        return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    } else {
        const auto *p = reinterpret_cast<const __m128i *>(chunk + J * kTile * 2);
        const __m128i lo = _mm_loadu_si128(p), hi = _mm_loadu_si128(p + 1);
        if constexpr (F == Format::F16) return {_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)};
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(lo), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(hi), 16))};
    }
}

inline void add_block(Columns &total, const Columns &part, const float *scale) {
    if (scale) {
        total.lo = _mm256_fmadd_ps(_mm256_loadu_ps(scale), part.lo, total.lo);
        total.hi = _mm256_fmadd_ps(_mm256_loadu_ps(scale + 8), part.hi, total.hi);
    } else {
        total.lo = _mm256_add_ps(total.lo, part.lo);
        total.hi = _mm256_add_ps(total.hi, part.hi);
    }
}

void store(const Weight &w, int64_t tile, const Columns &total, float *y) {
    const int64_t column = tile * kTile;
    if (column + kTile <= w.columns) {
        Columns v = total;
        if (w.bias) {
            v.lo = _mm256_add_ps(v.lo, _mm256_loadu_ps(w.bias + column));
            v.hi = _mm256_add_ps(v.hi, _mm256_loadu_ps(w.bias + column + 8));
        }
        _mm256_storeu_ps(y + column, v.lo);
        _mm256_storeu_ps(y + column + 8, v.hi);
        return;
    }
    alignas(32) float last[kTile];
    _mm256_store_ps(last, total.lo);
    _mm256_store_ps(last + 8, total.hi);
    for (int64_t c = column; c < w.columns; ++c) y[c] = w.bias ? last[c - column] + w.bias[c] : last[c - column];
}

template <Format F, int R, int T, int J>
inline void multiply_input(Columns (&part)[R][T], const uint8_t *const (&chunk)[T], const Key (&keys)[T], const float *const (&x)[R], int64_t k) {
    Columns w[T];
    for (int t = 0; t < T; ++t) w[t] = unpack<F, J>(chunk[t], keys[t]);
    for (int r = 0; r < R; ++r) {
        const __m256 v = _mm256_broadcast_ss(x[r] + k + J);
        for (int t = 0; t < T; ++t) {
            part[r][t].lo = _mm256_fmadd_ps(v, w[t].lo, part[r][t].lo);
            part[r][t].hi = _mm256_fmadd_ps(v, w[t].hi, part[r][t].hi);
        }
    }
}

// R rows x T tiles, weights unpacked in registers
template <Format F, int R, int T>
void few_rows(const Piece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t chunks = w.block_k / 8, tile_bytes = w.blocks * chunks * chunk_bytes(F);
    const float *x[R];
    for (int r = 0; r < R; ++r) x[r] = p.x + (row + r) * p.x_stride;
    const uint8_t *chunk[T];
    for (int t = 0; t < T; ++t) chunk[t] = w.codes + (tile + t) * tile_bytes;
    Columns total[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) total[r][t] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t b = 0, k = 0; b < w.blocks; ++b) {
        Columns part[R][T];
        Key keys[T];
        for (int t = 0; t < T; ++t) {
            keys[t] = load_key<F>(w, tile + t, b);
            for (int r = 0; r < R; ++r) part[r][t] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        }
        for (int64_t c = 0; c < chunks; ++c, k += 8) {
            multiply_input<F, R, T, 0>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 1>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 2>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 3>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 4>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 5>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 6>(part, chunk, keys, x, k);
            multiply_input<F, R, T, 7>(part, chunk, keys, x, k);
            for (int t = 0; t < T; ++t) chunk[t] += chunk_bytes(F);
        }
        for (int t = 0; t < T; ++t) {
            const float *scale = w.scales ? w.scales + ((tile + t) * w.blocks + b) * kTile : nullptr;
            for (int r = 0; r < R; ++r) add_block(total[r][t], part[r][t], scale);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(w, tile + t, total[r][t], p.y + (row + r) * p.y_stride);
}

template <Format F>
void few_rows_any(const Piece &p) {
    int64_t tile = p.tile;
    const int64_t rows = p.row_end - p.row;
    for (; rows == 1 && tile + 2 <= p.tile_end; tile += 2) few_rows<F, 1, 2>(p, p.row, tile);
    for (; rows == 2 && tile + 2 <= p.tile_end; tile += 2) few_rows<F, 2, 2>(p, p.row, tile);
    for (; tile < p.tile_end; ++tile) {
        if (rows == 1) few_rows<F, 1, 1>(p, p.row, tile);
        if (rows == 2) few_rows<F, 2, 1>(p, p.row, tile);
        if (rows == 3) few_rows<F, 3, 1>(p, p.row, tile);
        if (rows == 4) few_rows<F, 4, 1>(p, p.row, tile);
    }
}

template <Format F, int J>
inline void unpack_to(const uint8_t *chunk, const Key &key, float *panel) {
    const Columns w = unpack<F, J>(chunk, key);
    _mm256_store_ps(panel + J * kTile, w.lo);
    _mm256_store_ps(panel + J * kTile + 8, w.hi);
}

template <Format F>
void unpack_block(const Weight &w, int64_t tile, int64_t block, float *panel) {
    const int64_t chunks = w.block_k / 8;
    const uint8_t *chunk = w.codes + (tile * w.blocks + block) * chunks * chunk_bytes(F);
    const Key key = load_key<F>(w, tile, block);
    for (int64_t c = 0; c < chunks; ++c, chunk += chunk_bytes(F), panel += 8 * kTile) {
        unpack_to<F, 0>(chunk, key, panel);
        unpack_to<F, 1>(chunk, key, panel);
        unpack_to<F, 2>(chunk, key, panel);
        unpack_to<F, 3>(chunk, key, panel);
        unpack_to<F, 4>(chunk, key, panel);
        unpack_to<F, 5>(chunk, key, panel);
        unpack_to<F, 6>(chunk, key, panel);
        unpack_to<F, 7>(chunk, key, panel);
    }
}

// totals [R rows][kWideTiles * kTile] of one tile += one block, the weights being a panel [block_k][kTile]
template <int R>
void multiply_panel(const float *x, int64_t x_stride, const float *panel, int64_t block_k, const float *scale, float *totals) {
    __m256 lo[R], hi[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) lo[r] = hi[r] = _mm256_setzero_ps();
    for (const float *end = x + block_k; x != end; ++x, panel += kTile) {
        const __m256 w_lo = _mm256_loadu_ps(panel), w_hi = _mm256_loadu_ps(panel + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256 v = _mm256_broadcast_ss(x + r * x_stride);
            lo[r] = _mm256_fmadd_ps(v, w_lo, lo[r]);
            hi[r] = _mm256_fmadd_ps(v, w_hi, hi[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        float *t = totals + r * kWideTiles * kTile;
        Columns total{_mm256_load_ps(t), _mm256_load_ps(t + 8)};
        add_block(total, {lo[r], hi[r]}, scale);
        _mm256_store_ps(t, total.lo);
        _mm256_store_ps(t + 8, total.hi);
    }
}

void multiply_panel_any(int64_t rows, const float *x, int64_t x_stride, const float *panel, int64_t block_k, const float *scale, float *totals) {
    switch (rows) {
        case 1: return multiply_panel<1>(x, x_stride, panel, block_k, scale, totals);
        case 2: return multiply_panel<2>(x, x_stride, panel, block_k, scale, totals);
        case 3: return multiply_panel<3>(x, x_stride, panel, block_k, scale, totals);
        case 4: return multiply_panel<4>(x, x_stride, panel, block_k, scale, totals);
        case 5: return multiply_panel<5>(x, x_stride, panel, block_k, scale, totals);
        default: return multiply_panel<6>(x, x_stride, panel, block_k, scale, totals);
    }
}

template <Format F>
void many_rows(const Piece &p, float *scratch) {
    const Weight &w = *p.weight;
    const int64_t tiles = p.tile_end - p.tile, rows = p.row_end - p.row;
    float *totals = scratch, *panels = scratch + kRowChunk * kWideTiles * kTile;
    for (int64_t i = 0; i < rows * kWideTiles * kTile; ++i) totals[i] = 0.0f;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const float *panel[kWideTiles];
        for (int64_t t = 0; t < tiles; ++t) {
            if constexpr (F == Format::F32) {
                panel[t] = reinterpret_cast<const float *>(w.codes) + ((p.tile + t) * w.blocks + b) * w.block_k * kTile;
            } else {
                panel[t] = panels + t * w.block_k * kTile;
                unpack_block<F>(w, p.tile + t, b, panels + t * w.block_k * kTile);
            }
        }
        for (int64_t r = 0; r < rows; r += 6) {
            const float *x = p.x + (p.row + r) * p.x_stride + b * w.block_k;
            for (int64_t t = 0; t < tiles; ++t) {
                const float *scale = w.scales ? w.scales + ((p.tile + t) * w.blocks + b) * kTile : nullptr;
                multiply_panel_any(rows - r, x, p.x_stride, panel[t], w.block_k, scale, totals + r * kWideTiles * kTile + t * kTile);
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < tiles; ++t) {
            const float *v = totals + (r * kWideTiles + t) * kTile;
            store(w, p.tile + t, {_mm256_load_ps(v), _mm256_load_ps(v + 8)}, p.y + (p.row + r) * p.y_stride);
        }
}

template <Format F>
void any_rows(const Piece &p, float *scratch) {
    if (p.row_end - p.row <= kFewRows)
        few_rows_any<F>(p);
    else
        many_rows<F>(p, scratch);
}

}  // namespace

void linear_avx2(const Piece &piece, float *scratch) {
    switch (piece.weight->format) {
        case Format::INT4: return any_rows<Format::INT4>(piece, scratch);
        case Format::INT8: return any_rows<Format::INT8>(piece, scratch);
        case Format::F32: return any_rows<Format::F32>(piece, scratch);
        case Format::F16: return any_rows<Format::F16>(piece, scratch);
        case Format::BF16: return any_rows<Format::BF16>(piece, scratch);
        case Format::BOOK4: return any_rows<Format::BOOK4>(piece, scratch);
        case Format::E4M3: return any_rows<Format::E4M3>(piece, scratch);
    }
}

}  // namespace qforge
