// The linear for AVX-512 (compiled with its flags; called only where CPUID has it): 16 columns are one register. Bits are those of AVX2.
#include <immintrin.h>

#include "qforge/linear.h"

namespace qforge {
namespace {

struct Columns {
    using Input = __m512;
    __m512 v;

    static Columns zero() { return {_mm512_setzero_ps()}; }
    static Columns load(const float *p) { return {_mm512_loadu_ps(p)}; }
    static Input input(const float *x) { return _mm512_set1_ps(*x); }
    void store(float *p) const { _mm512_storeu_ps(p, v); }
    void add(const Columns &b) { v = _mm512_add_ps(v, b.v); }
    void add_product(const Columns &a, const Columns &b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
    void add_product(Input x, const Columns &w) { v = _mm512_fmadd_ps(x, w.v, v); }
};

// What four bits stand for, and the zero points of 16 columns
struct Key {
    __m512 book, zeros;
};

constexpr int kPanelRows = 12, kPanelTiles = 2;
constexpr int kFewTiles[] = {4, 2, 2, 2};

template <Format F>
inline Key load_key(const Weight &w, int64_t tile, int64_t block) {
    Key key{_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_setzero_ps()};
    if constexpr (F == Format::BOOK4) key.book = _mm512_loadu_ps(w.book);
    if constexpr (has_zeros(F)) key.zeros = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.zeros + (tile * w.blocks + block) * kTile))));
    return key;
}

template <Format F, int J>
inline Columns unpack(const uint8_t *chunk, const Key &key) {
    if constexpr (F == Format::INT4 || F == Format::BOOK4) {
        const __m512 value = _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(chunk), J % 4 * 8 + J / 4 * 4), key.book);  // permutes read four bits of an index
        return {F == Format::INT4 ? _mm512_sub_ps(value, key.zeros) : value};
    } else if constexpr (F == Format::INT8) {
        const __m512i codes = _mm512_and_si512(_mm512_srli_epi32(_mm512_loadu_si512(chunk + J / 4 * 64), J % 4 * 8), _mm512_set1_epi32(255));
        return {_mm512_sub_ps(_mm512_cvtepi32_ps(codes), key.zeros)};
    } else if constexpr (F == Format::E4M3) {
        // its sign, exponent and mantissa where fp32 has them, and the difference of both exponents' biases
        const __m512i high = _mm512_srai_epi32(_mm512_slli_epi32(_mm512_loadu_si512(chunk + J / 4 * 64), 24 - J % 4 * 8), 4);
        return {_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(high, _mm512_set1_epi32(static_cast<int>(0x87F00000u)))), _mm512_set1_ps(0x1p120f))};
    } else if constexpr (F == Format::F32) {
        return {_mm512_loadu_ps(reinterpret_cast<const float *>(chunk) + J * kTile)};
    } else {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(chunk) + J);
        if constexpr (F == Format::F16) return {_mm512_cvtph_ps(halves)};
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
    }
}

}  // namespace
}  // namespace qforge

#include "linear_x86.inl"

namespace qforge {

void linear_avx512(const Piece &piece, float *scratch) { any_format(piece, scratch); }

}  // namespace qforge
