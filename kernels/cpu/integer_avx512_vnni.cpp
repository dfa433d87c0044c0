// The integer product for AVX-512 with VNNI (compiled with those flags; called only where CPUID has them): see integer.h.
#include "qforge/integer.h"

#include <limits>

#include "vnni_512.inl"

#include "sums_x86.inl"

namespace qforge {
namespace {

// ---- rounding ----

// Rounds `width` inputs; returns the sum of their codes
int32_t round_inputs(const float *x, int64_t width, float scale, int8_t *codes) {
    const __m512 s = _mm512_set1_ps(scale), least = _mm512_set1_ps(-128.0f), most = _mm512_set1_ps(127.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 here = lanes(width - i);
        const __m512 code = _mm512_roundscale_ps(_mm512_div_ps(_mm512_maskz_loadu_ps(here, x + i), s), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512i words = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(code, least), most));
        sum = _mm512_add_epi32(sum, words);
        store_bytes(codes + i, words, width - i);
    }
    return _mm512_reduce_add_epi32(sum);
}

void round_rows(const RoundedRows &rows, int64_t first, int64_t end) {
    constexpr uint32_t kInfinity = 0x7F800000;
    const int64_t runs = rows.width / rows.run;
    for (int64_t r = first; r < end; ++r) {
        const float *x = rows.x + r * rows.x_stride;
        int8_t *codes = static_cast<int8_t *>(rows.codes) + r * rows.width;
        int32_t *sums = rows.sums + r * runs;
        const uint32_t bits = largest_bits(x, rows.width);
        if (bits >= kInfinity) {
            rows.scales[r] = std::numeric_limits<float>::quiet_NaN();
            __builtin_memset(codes, 0, static_cast<size_t>(rows.width));
            __builtin_memset(sums, 0, static_cast<size_t>(runs) * sizeof(int32_t));
            continue;
        }
        float scale = rows.static_scale;
        if (scale == 0) scale = __builtin_bit_cast(float, bits) / 127.5f;
        rows.scales[r] = scale == 0 ? 1.0f : scale;
        for (int64_t i = 0; i < runs; ++i) sums[i] = round_inputs(x + i * rows.run, rows.run, rows.scales[r], codes + i * rows.run);
    }
}

// ---- product ----

// What sums of a run start with: - zero point * sum of the row's codes, whose product with unsigned weight codes comes after
inline __m512i start_of(const Weight &w, const uint8_t *zeros, int32_t codes) {
    if (w.zero >= 0) return _mm512_set1_epi32(-w.zero * codes);
    return _mm512_mullo_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(zeros))), _mm512_set1_epi32(-codes));
}

template <Format F>
struct Product {
    static constexpr int kLimbs = 1, kMost = 6;  // rows whose sums and totals, with two tiles, are in registers
    const IntegerPiece &p;
    Ahead codes_ahead{};

    explicit Product(const IntegerPiece &piece) : p(piece) {}
    void begin(const Strip &strip) {
        codes_ahead = next_tiles(*p.weight, p.weight->codes, tile_bytes(*p.weight), strip);
    }

    template <int R, int T>
    void compute(int64_t row, int64_t tile) {
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), runs = w.blocks / w.run;
        const int8_t *x = static_cast<const int8_t *>(p.codes) + row * inputs;
        const int32_t *code_sum = p.sums + row * runs;
        const uint8_t *chunk[T];
        V::Floats total[R][T];
        for (int t = 0; t < T; ++t) {
            chunk[t] = w.codes + (tile + t) * inputs / 8 * chunk_bytes(F);
            for (int r = 0; r < R; ++r) total[r][t] = V::spread(0);
        }
        for (int64_t b = 0; b < w.blocks; ++code_sum) {
            V::Sums sum[R][T];
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
                for (int t = 0; t < T; ++t) sum[r][t] = start_of(w, w.zeros + ((tile + t) * w.blocks + b) * kTile, code_sum[r * runs]);
            for (const int64_t end = b + w.run; b < end; ++b, x += w.block_k) {
                codes_ahead.fetch();
                p.cache->fetch(R * T * kTile * w.block_k);
                add_chunks<F, false, R, T>(sum, chunk, x, inputs, w.block_k / 8);
            }
            for (int t = 0; t < T; ++t) {
                const V::Floats scale = V::load(w.scales + ((tile + t) * w.blocks + b - 1) * kTile);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) total[r][t] = V::fma(scale, V::to_floats(sum[r][t]), total[r][t]);
            }
        }
        for (int t = 0; t < T; ++t) {
            const int64_t column = (tile + t) * kTile;
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
                V::store(p.y + (row + r) * p.y_stride + column, _mm512_mul_ps(total[r][t], V::spread(p.scales[row + r])), w.bias ? w.bias + column : nullptr, w.columns - column);
        }
    }
};

void piece(const IntegerPiece &p, void *) { p.weight->format == Format::INT4 ? all_rows(p, Product<Format::INT4>(p)) : all_rows(p, Product<Format::INT8>(p)); }

}  // namespace

constinit const IntegerFunctions integer_avx512_vnni = {round_rows, piece, 12, kRowChunk, nullptr, false, 1};

}  // namespace qforge
