// Packed weights become bf16, 16 columns at a time, laid out for AMX's tiles (bf16.h has the arithmetic).
#include "qforge/bf16.h"
#include "vnni_512.inl"

namespace qforge {
namespace {

constexpr int64_t kPanelBytes = kTileValues * 2;  // of a stretch: [16 pairs of inputs][16 columns][2]

// Kept in a register: GCC makes constants anew where they are used, by the port that shuffles wait for.
inline __m512i kept(__m512i v) {
    asm("" : "+v"(v));
    return v;
}

// INT4, INT8: a code is put into the mantissa of 1.0, value = fma(1 + code / 2^k, 2^k * scale, first). BOOK4: value = fma(book[code], scale, first).
template <Format F>
struct Line {
    __m512 scale[3], first[3];  // of a block of 16 columns, by k: 4, 8, 12

    // `ahead`: so much further are scales that are needed soon: nobody else brings them
    Line(const Weight &w, int64_t at, int64_t ahead) {
        __builtin_prefetch(w.scales + at + ahead, 0, 2);
        if (F != Format::BOOK4 && w.zero < 0) __builtin_prefetch(w.zeros + at + ahead, 0, 2);
        const __m512 read = _mm512_loadu_ps(w.scales + at);
        const __m512 number = _mm512_mask_mov_ps(read, _mm512_cmp_ps_mask(read, read, _CMP_UNORD_Q), _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));  // rounding carries into no sign
        scale[0] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(number, _mm512_set1_ps(raised_by(F)))), _mm512_set1_epi32(0x1000)), _mm512_set1_epi32(-0x2000)));
        if constexpr (F == Format::BOOK4) return;
        const __m512 zeros = w.zero >= 0 ? _mm512_set1_ps(static_cast<float>(w.zero)) : V::zeros(w.zeros + at);  // one for all is not read: of blocks of 64, a 37th of what is
        for (int i = 2; i >= 0; --i) {
            const __m512 more = _mm512_set1_ps(static_cast<float>(1 << 4 * (i + 1)));
            first[i] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(_mm512_add_ps(more, zeros), scale[0]));
            scale[i] = _mm512_mul_ps(scale[0], more);
        }
    }
};

template <Format F>
class Codes {
  public:
    static constexpr int kVectors = F == Format::INT8 ? 2 : 1;  // of a chunk, 4 bytes of each column

    explicit Codes(const Weight &w) {
        for (int i = 0; i < 3; ++i) masks_[i] = kept(_mm512_set1_epi32((F == Format::INT8 ? 255 : 15) << (19 - 4 * i)));
        if constexpr (F == Format::BOOK4) book_ = _mm512_loadu_ps(w.book);
    }

    // 8 inputs of 16 columns, as tiles take them; `ahead`: bytes to codes that are needed soon
    void chunk(const uint8_t *from, const Line<F> &line, uint8_t *to, int64_t ahead) const {
        __m512i vectors[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            __builtin_prefetch(from + ahead + v * 64, 0, 2);
            vectors[v] = _mm512_loadu_si512(from + v * 64);
        }
        pair<0>(vectors, line, to);
        pair<2>(vectors, line, to);
        pair<4>(vectors, line, to);
        pair<6>(vectors, line, to);
    }

  private:
    // Inputs `I` and `I` + 1
    template <int I>
    void pair(const __m512i (&chunk)[kVectors], const Line<F> &line, uint8_t *to) const {
        _mm512_store_si512(to + I * 32, _mm512_mask_shuffle_epi8(_mm512_castps_si512(value<I + 1>(chunk, line)), 0x3333333333333333, _mm512_castps_si512(value<I>(chunk, line)), upper_words_));
    }
    template <int I>
    __m512 value(const __m512i (&chunk)[kVectors], const Line<F> &line) const {
        constexpr int kAt = I % 4 * 8 + (F == Format::INT8 ? 0 : I / 4 * 4);  // of a code in its lane
        if constexpr (F == Format::BOOK4) return _mm512_mul_ps(_mm512_permutexvar_ps(shifted<kAt>(chunk[0]), book_), line.scale[0]);  // takes the lowest 4 bits
        constexpr int k = mantissa_bits(F, I), kPlace = 23 - k;
        // One shift brings three codes to their places.
        const __m512i m = _mm512_ternarylogic_epi32(shifted<kAt - kPlace>(chunk[I / 4 % kVectors]), masks_[k / 4 - 1], one_, 0xEA);
        return _mm512_fmadd_ps(_mm512_castsi512_ps(m), line.scale[k / 4 - 1], line.first[k / 4 - 1]);
    }
    template <int N>
    static __m512i shifted(__m512i v) {
        if constexpr (N > 0) return _mm512_srli_epi32(v, N);
        if constexpr (N < 0) return _mm512_slli_epi32(v, -N);
        return v;
    }

    __m512i masks_[3];  // by k
    __m512i one_ = kept(_mm512_set1_epi32(0x3F800000)), upper_words_ = kept(_mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302));
    __m512 book_;
};

// A tile of 16 columns as a whole, blocks of any size
template <Format F>
void make(const Weight &w, int64_t tile, uint8_t *panel) {
    constexpr int64_t kAhead = 4096;
    const Codes<F> codes(w);
    const uint8_t *from = w.codes + tile * w.inputs() / 8 * chunk_bytes(F);
    uint8_t *to = panel;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const Line<F> line(w, (tile * w.blocks + b) * kTile, kTile);
        for (int64_t i = 0; i < w.block_k / 8; ++i, from += chunk_bytes(F), to += 256) codes.chunk(from, line, to, kAhead);
    }
    for (; to < panel + stretches(w) * kPanelBytes; to += 64) _mm512_store_si512(to, _mm512_setzero_si512());
}

}  // namespace
}  // namespace qforge
