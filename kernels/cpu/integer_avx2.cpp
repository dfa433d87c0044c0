// The integer product for AVX2 (compiled with that flag; called only where CPUID has it): products of pairs of 16-bit integers, added to 32-bit sums. See integer.h.
#include <immintrin.h>

#include <limits>

#include "qforge/integer.h"

namespace qforge {
namespace {

// ---- rounding ----

// The largest magnitude's bits: of finite floats they rise with the value, those of infinities and NaNs are larger still.
uint32_t largest_bits(const float *x, int64_t width) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i most = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i)), magnitude));
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), most);
    uint32_t found = 0;
    for (const uint32_t lane : lanes) found = lane > found ? lane : found;
    return found;
}

void round_row(const float *x, int64_t width, float scale, int16_t *codes) {
    const __m256 s = _mm256_set1_ps(scale), least = _mm256_set1_ps(-128.0f), most = _mm256_set1_ps(127.0f);
    for (int64_t i = 0; i < width; i += 8) {
        const __m256 code = _mm256_round_ps(_mm256_div_ps(_mm256_loadu_ps(x + i), s), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i words = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(code, least), most));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(codes + i), _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
}

void round_rows(const RoundedRows &rows, int64_t first, int64_t end) {
    constexpr uint32_t kInfinity = 0x7F800000;
    for (int64_t r = first; r < end; ++r) {
        const float *x = rows.x + r * rows.x_stride;
        int16_t *codes = static_cast<int16_t *>(rows.codes) + r * rows.width;
        const uint32_t bits = largest_bits(x, rows.width);
        if (bits >= kInfinity) {
            rows.scales[r] = std::numeric_limits<float>::quiet_NaN();
            for (int64_t i = 0; i < rows.width; ++i) codes[i] = 0;
            continue;
        }
        float scale = rows.static_scale;
        if (scale == 0) scale = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits)))) / 127.5f;
        rows.scales[r] = scale == 0 ? 1.0f : scale;
        round_row(x, rows.width, rows.scales[r], codes);
    }
}

// ---- product ----

struct Pairs {  // of 16 columns: two neighbouring inputs as 16-bit integers; or 16 sums in 32 bits
    __m256i lo, hi;
};

struct Chunk {  // 8 inputs of 16 columns, code - zero
    Pairs pair[4];
};

// zero points of 16 columns, each twice in a lane
inline Pairs load_zeros(const Weight &w, int64_t tile, int64_t block) {
    const __m128i z = _mm_loadu_si128(reinterpret_cast<const __m128i *>(w.zeros + (tile * w.blocks + block) * kTile));
    const __m256i lo = _mm256_cvtepu8_epi32(z), hi = _mm256_cvtepu8_epi32(_mm_srli_si128(z, 8));
    return {_mm256_or_si256(lo, _mm256_slli_epi32(lo, 16)), _mm256_or_si256(hi, _mm256_slli_epi32(hi, 16))};
}

// bytes 2 P and 2 P + 1 of each lane, widened, less the zero point
template <int P>
inline __m256i widen(__m256i lanes, __m256i zero) {
    constexpr char a = 2 * P, b = 2 * P + 1, n = -1;
    const __m256i order = _mm256_setr_epi8(a, n, b, n, 4 + a, n, 4 + b, n, 8 + a, n, 8 + b, n, 12 + a, n, 12 + b, n, a, n, b, n, 4 + a, n, 4 + b, n, 8 + a, n, 8 + b, n, 12 + a, n, 12 + b, n);
    return _mm256_sub_epi16(_mm256_shuffle_epi8(lanes, order), zero);
}

template <Format F>
inline Chunk unpack(const uint8_t *chunk, const Pairs &zero) {
    const auto *p = reinterpret_cast<const __m256i *>(chunk);
    __m256i first_lo = _mm256_loadu_si256(p), first_hi = _mm256_loadu_si256(p + 1), last_lo, last_hi;
    if constexpr (F == Format::INT4) {
        const __m256i nibble = _mm256_set1_epi8(15);
        last_lo = _mm256_and_si256(_mm256_srli_epi32(first_lo, 4), nibble);
        last_hi = _mm256_and_si256(_mm256_srli_epi32(first_hi, 4), nibble);
        first_lo = _mm256_and_si256(first_lo, nibble);
        first_hi = _mm256_and_si256(first_hi, nibble);
    } else {
        last_lo = _mm256_loadu_si256(p + 2);
        last_hi = _mm256_loadu_si256(p + 3);
    }
    return {{{widen<0>(first_lo, zero.lo), widen<0>(first_hi, zero.hi)},
             {widen<1>(first_lo, zero.lo), widen<1>(first_hi, zero.hi)},
             {widen<0>(last_lo, zero.lo), widen<0>(last_hi, zero.hi)},
             {widen<1>(last_lo, zero.lo), widen<1>(last_hi, zero.hi)}}};
}

inline __m256i two_inputs(const int16_t *x) {
    int both;
    __builtin_memcpy(&both, x, 4);
    return _mm256_set1_epi32(both);
}

inline void multiply(Pairs &sum, __m256i x, const Pairs &w) {
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(x, w.lo));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(x, w.hi));
}

// total += scale * sum
inline void add_run(__m256 &lo, __m256 &hi, const Pairs &sum, const float *scale) {
    lo = _mm256_fmadd_ps(_mm256_loadu_ps(scale), _mm256_cvtepi32_ps(sum.lo), lo);
    hi = _mm256_fmadd_ps(_mm256_loadu_ps(scale + 8), _mm256_cvtepi32_ps(sum.hi), hi);
}

void store(const Weight &w, int64_t tile, __m256 lo, __m256 hi, float row_scale, float *y) {
    const int64_t column = tile * kTile;
    alignas(32) float last[kTile];
    _mm256_store_ps(last, _mm256_mul_ps(lo, _mm256_set1_ps(row_scale)));
    _mm256_store_ps(last + 8, _mm256_mul_ps(hi, _mm256_set1_ps(row_scale)));
    for (int64_t c = column; c < w.columns && c < column + kTile; ++c) y[c] = w.bias ? last[c - column] + w.bias[c] : last[c - column];
}

// R rows x one tile, weights unpacked in registers
template <Format F, int R>
void few_rows(const IntegerPiece &p, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t chunks = w.block_k / 8;
    const uint8_t *chunk = w.codes + tile * w.blocks * chunks * chunk_bytes(F);
    const int16_t *x[R];
    Pairs sum[R];
    __m256 lo[R], hi[R];
    for (int r = 0; r < R; ++r) {
        x[r] = static_cast<const int16_t *>(p.codes) + (p.row + r) * w.inputs();
        lo[r] = hi[r] = _mm256_setzero_ps();
        sum[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    }
    for (int64_t b = 0, k = 0; b < w.blocks; ++b) {
        const Pairs zero = load_zeros(w, tile, b);
        for (int64_t c = 0; c < chunks; ++c, k += 8, chunk += chunk_bytes(F)) {
            const Chunk values = unpack<F>(chunk, zero);
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 4; ++i) multiply(sum[r], two_inputs(x[r] + k + 2 * i), values.pair[i]);
        }
        if ((b + 1) % w.run) continue;
        for (int r = 0; r < R; ++r) {
            add_run(lo[r], hi[r], sum[r], w.scales + (tile * w.blocks + b) * kTile);
            sum[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        }
    }
    for (int r = 0; r < R; ++r) store(w, tile, lo[r], hi[r], p.scales[p.row + r], p.y + (p.row + r) * p.y_stride);
}

template <Format F>
void few_rows_any(const IntegerPiece &p) {
    const int64_t rows = p.row_end - p.row;
    for (int64_t tile = p.tile; tile < p.tile_end; ++tile) {
        if (rows == 1) few_rows<F, 1>(p, tile);
        if (rows == 2) few_rows<F, 2>(p, tile);
        if (rows == 3) few_rows<F, 3>(p, tile);
        if (rows == 4) few_rows<F, 4>(p, tile);
    }
}

template <Format F>
void unpack_block(const Weight &w, int64_t tile, int64_t block, int16_t *panel) {
    const int64_t chunks = w.block_k / 8;
    const uint8_t *chunk = w.codes + (tile * w.blocks + block) * chunks * chunk_bytes(F);
    const Pairs zero = load_zeros(w, tile, block);
    for (int64_t c = 0; c < chunks; ++c, chunk += chunk_bytes(F)) {
        const Chunk values = unpack<F>(chunk, zero);
        for (const Pairs &pair : values.pair) {
            _mm256_store_si256(reinterpret_cast<__m256i *>(panel), pair.lo);
            _mm256_store_si256(reinterpret_cast<__m256i *>(panel + 16), pair.hi);
            panel += 2 * kTile;
        }
    }
}

// sums [R rows][kWideTiles * kTile] of one tile += one block, the weights being a panel [block_k / 2][kTile][2]
template <int R>
void multiply_panel(const int16_t *x, int64_t x_stride, const int16_t *panel, int64_t block_k, int32_t *sums) {
    Pairs sum[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const auto *s = reinterpret_cast<const __m256i *>(sums + r * kWideTiles * kTile);
        sum[r] = {_mm256_load_si256(s), _mm256_load_si256(s + 1)};
    }
    for (const int16_t *end = x + block_k; x != end; x += 2, panel += 2 * kTile) {
        const auto *p = reinterpret_cast<const __m256i *>(panel);
        const Pairs w{_mm256_load_si256(p), _mm256_load_si256(p + 1)};
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) multiply(sum[r], two_inputs(x + r * x_stride), w);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        auto *s = reinterpret_cast<__m256i *>(sums + r * kWideTiles * kTile);
        _mm256_store_si256(s, sum[r].lo);
        _mm256_store_si256(s + 1, sum[r].hi);
    }
}

void multiply_panel_any(int64_t rows, const int16_t *x, int64_t x_stride, const int16_t *panel, int64_t block_k, int32_t *sums) {
    switch (rows) {
        case 1: return multiply_panel<1>(x, x_stride, panel, block_k, sums);
        case 2: return multiply_panel<2>(x, x_stride, panel, block_k, sums);
        case 3: return multiply_panel<3>(x, x_stride, panel, block_k, sums);
        case 4: return multiply_panel<4>(x, x_stride, panel, block_k, sums);
        case 5: return multiply_panel<5>(x, x_stride, panel, block_k, sums);
        default: return multiply_panel<6>(x, x_stride, panel, block_k, sums);
    }
}

// totals += scale * sums of a whole piece, sums = 0
void end_run(const Weight &w, int64_t first_tile, int64_t tiles, int64_t block, int64_t rows, int32_t *sums, float *totals) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t at = (r * kWideTiles + t) * kTile;
            auto *s = reinterpret_cast<__m256i *>(sums + at);
            __m256 lo = _mm256_load_ps(totals + at), hi = _mm256_load_ps(totals + at + 8);
            add_run(lo, hi, {_mm256_load_si256(s), _mm256_load_si256(s + 1)}, w.scales + ((first_tile + t) * w.blocks + block) * kTile);
            _mm256_store_ps(totals + at, lo);
            _mm256_store_ps(totals + at + 8, hi);
            _mm256_store_si256(s, _mm256_setzero_si256());
            _mm256_store_si256(s + 1, _mm256_setzero_si256());
        }
}

template <Format F>
void many_rows(const IntegerPiece &p, int32_t *scratch) {
    const Weight &w = *p.weight;
    const int64_t tiles = p.tile_end - p.tile, rows = p.row_end - p.row, size = kRowChunk * kWideTiles * kTile;
    int32_t *sums = scratch;
    auto *totals = reinterpret_cast<float *>(scratch + size);
    auto *panels = reinterpret_cast<int16_t *>(scratch + 2 * size);
    for (int64_t i = 0; i < rows * kWideTiles * kTile; ++i) {
        sums[i] = 0;
        totals[i] = 0.0f;
    }
    for (int64_t b = 0; b < w.blocks; ++b) {
        for (int64_t t = 0; t < tiles; ++t) unpack_block<F>(w, p.tile + t, b, panels + t * w.block_k * kTile);
        for (int64_t r = 0; r < rows; r += 6) {
            const int16_t *x = static_cast<const int16_t *>(p.codes) + (p.row + r) * w.inputs() + b * w.block_k;
            for (int64_t t = 0; t < tiles; ++t)
                multiply_panel_any(rows - r, x, w.inputs(), panels + t * w.block_k * kTile, w.block_k, sums + (r * kWideTiles + t) * kTile);
        }
        if ((b + 1) % w.run == 0) end_run(w, p.tile, tiles, b, rows, sums, totals);
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < tiles; ++t) {
            const float *v = totals + (r * kWideTiles + t) * kTile;
            store(w, p.tile + t, _mm256_load_ps(v), _mm256_load_ps(v + 8), p.scales[p.row + r], p.y + (p.row + r) * p.y_stride);
        }
}

template <Format F>
void any_rows(const IntegerPiece &p, int32_t *scratch) {
    if (p.row_end - p.row <= kFewRows)
        few_rows_any<F>(p);
    else
        many_rows<F>(p, scratch);
}

// int32 sums and float totals of a piece, and an unpacked block of each of its tiles in int16
int64_t scratch_bytes(const Weight &w) { return kWideTiles * kTile * (2 * kRowChunk * 4 + w.block_k * 2); }

void piece(const IntegerPiece &p, void *scratch) {
    auto *words = static_cast<int32_t *>(scratch);
    p.weight->format == Format::INT4 ? any_rows<Format::INT4>(p, words) : any_rows<Format::INT8>(p, words);
}

}  // namespace

constinit const IntegerFunctions integer_avx2 = {round_rows, piece, 6, kRowChunk, scratch_bytes, true, 2};

}  // namespace qforge
