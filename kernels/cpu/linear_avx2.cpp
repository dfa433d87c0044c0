// The linear for AVX2 + FMA + F16C (compiled with those flags; called only where CPUID has them): 16 columns are two registers.
#include <immintrin.h>

#include "qforge/linear.h"

namespace qforge {
namespace {

struct Columns {
    using Input = __m256;
    __m256 lo, hi;

    static Columns zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static Columns load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Input input(const float *x) { return _mm256_broadcast_ss(x); }
    void store(float *p) const {
        _mm256_storeu_ps(p, lo);
        _mm256_storeu_ps(p + 8, hi);
    }
    void add(const Columns &v) {
        lo = _mm256_add_ps(lo, v.lo);
        hi = _mm256_add_ps(hi, v.hi);
    }
    void add_product(const Columns &a, const Columns &b) {
        lo = _mm256_fmadd_ps(a.lo, b.lo, lo);
        hi = _mm256_fmadd_ps(a.hi, b.hi, hi);
    }
    void add_product(Input x, const Columns &w) {
        lo = _mm256_fmadd_ps(x, w.lo, lo);
        hi = _mm256_fmadd_ps(x, w.hi, hi);
    }
};

// The zero points of 16 columns, or both halves of the book
struct Key {
    __m256i lo, hi;
};

constexpr int kPanelRows = 6, kPanelTiles = 1;
constexpr int kFewTiles[] = {2, 2, 1, 1};

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

}  // namespace
}  // namespace qforge

#include "linear_x86.inl"

namespace qforge {

void linear_avx2(const Piece &piece, float *scratch) { any_format(piece, scratch); }

}  // namespace qforge
