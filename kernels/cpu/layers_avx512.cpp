// The functions of layers.h for AVX-512 with VNNI and BF16 (compiled with those flags; called only where CPUID has them): what AVX2 does, with their dot products in attention.
#include <immintrin.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_512.inl"

inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// Rows of weights or queries that lie side by side, four codes of each
constexpr int64_t side_by_side(int rows) { return (rows + 3) / 4 * 4; }

// Numbers of R rows, row r at x(r), 16 `tiles` of them, times by[r] -> four codes each [16 tiles / 4][side_by_side(R)], bytes with a sign or from 0 to 255; each(first of four rows, their 16 codes each) sees them, too
template <int R, bool Sign, typename X, typename Each>
inline void pack_rows(const X &x, const float *by, int64_t tiles, float *to, const Each &each) {
    constexpr int64_t wide = side_by_side(R);
#pragma GCC unroll 3
    for (int r = 0; r < R; r += 4)
        for (int64_t i = 0; i < tiles; ++i) {
            __m512i row[4];
#pragma GCC unroll 4
            for (int n = 0; n < 4; ++n) row[n] = r + n < R ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x(r + n) + i * 16), _mm512_set1_ps(by[r + n]))) : _mm512_setzero_si512();
            const __m512i upper = _mm512_packs_epi32(row[0], row[1]), lower = _mm512_packs_epi32(row[2], row[3]), bytes = Sign ? _mm512_packs_epi16(upper, lower) : _mm512_packus_epi16(upper, lower);
            each(r, bytes);
            float *four = to + i * 4 * wide + r;
            _mm_storeu_si128(reinterpret_cast<__m128i *>(four), _mm512_castsi512_si128(bytes));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(four + wide), _mm512_extracti32x4_epi32(bytes, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(four + 2 * wide), _mm512_extracti32x4_epi32(bytes, 2));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(four + 3 * wide), _mm512_extracti32x4_epi32(bytes, 3));
        }
}

// Of bytes, one side is unsigned: keys + 128, so sums begin with -128 times the sum of a query's codes
struct KeyDots {
    using Columns = __m512i;
    static constexpr int64_t kCodes = 4;
    __m512i v;
    static KeyDots from(int32_t start) { return {_mm512_set1_epi32(start)}; }
    static constexpr int64_t beside(int rows) { return side_by_side(rows); }
    // Queries, row r's 16 `tiles` numbers at x(r), from -127 to 127 when multiplied with `by` -> [16 tiles / kCodes][beside(R)]; what their sums begin with
    template <int R, typename X>
    static void pack(const X &x, const float *by, int64_t tiles, float *to, int32_t *starts) {
        __m512i sums[side_by_side(R) / 4] = {};
        pack_rows<R, true>(x, by, tiles, to, [&](int r, __m512i bytes) { sums[r / 4] = _mm512_dpbusd_epi32(sums[r / 4], _mm512_set1_epi8(static_cast<char>(128)), bytes); });
        for (int r = 0; r < R; r += 4) {
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums[r / 4]), _mm512_extracti64x4_epi64(sums[r / 4], 1));
            alignas(16) int32_t four[4];
            _mm_store_si128(reinterpret_cast<__m128i *>(four), _mm_sub_epi32(_mm_setzero_si128(), _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1))));
            std::copy_n(four, std::min(4, R - r), starts + r);
        }
    }
    static Columns key(const int8_t *p) { return _mm512_xor_si512(fours(_mm512_loadu_si512(p)), _mm512_set1_epi8(static_cast<char>(0x80))); }
    void add(Columns c, const float &four) { asm("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(v) : "m"(four), "v"(c)); }
    Lanes get() const { return {_mm512_cvtepi32_ps(v)}; }
};

struct ValueDots {
    using Columns = __m512i;
    static constexpr int64_t kCodes = 4;
    static constexpr int64_t beside(int rows) { return side_by_side(rows); }
    __m512i v = _mm512_setzero_si512();
    // Numbers [R][stride] from 0 to 255 when multiplied with `by` -> [16 tiles / kCodes][beside(R)]
    template <int R>
    static void pack(const float *x, int64_t stride, const float *by, int64_t tiles, float *to) {
        pack_rows<R, false>([&](int r) { return x + r * stride; }, by, tiles, to, [](int, __m512i) {});
    }
    static Columns value(const int8_t *p, int64_t next) {
        const auto load = [](const int8_t *pairs) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(pairs)); };
        return fours(_mm512_inserti64x4(_mm512_castsi256_si512(load(p)), load(p + next), 1));
    }
    void add(Columns c, const float &four) {
        __m512i all;  // one after the other: GCC would have 12 of them in registers, and sums in memory
        asm("vpbroadcastd %2, %1\n\tvpdpbusd %3, %1, %0" : "+v"(v), "=&v"(all) : "m"(four), "v"(c));
    }
    Lanes get() const { return {_mm512_cvtepi32_ps(v)}; }
};

struct Bf16Dots {
    using Columns = __m512bh;
    static constexpr int64_t kCodes = 2;
    __m512 v = _mm512_setzero_ps();
    static Bf16Dots from(int32_t) { return {}; }
    static Columns key(const Bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    static Columns value(const Bf16 *p, int64_t) { return key(p); }
    void add(Columns c, const float &pair) { asm("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(v) : "m"(pair), "v"(c)); }
    Lanes get() const { return {v}; }
};

inline void put_every_second(const int8_t *codes, int64_t count, int8_t *to, int64_t odd) {
    const __mmask64 here = odd ? 0xAAAAAAAAAAAAAAAA : 0x5555555555555555;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + i)));
        _mm512_mask_storeu_epi8(to + 2 * i, here, odd ? _mm512_slli_epi16(words, 8) : words);
    }
    for (; i < count; ++i) to[2 * i + odd] = codes[i];
}

constexpr int kSums = 12;

#include "layers.inl"

}  // namespace

constinit const LayerFunctions layers_avx512{norm, residual, gate, rotate_and_store, clear_after, attend};

}  // namespace qforge
