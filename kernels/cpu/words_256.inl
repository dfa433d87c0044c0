// Products with codes of one byte or two that have no middle (blockwise.h), for AVX2: activations' and weights' codes are multiplied as words of 16 bits, pairs of products added in 32. After blockwise_x86.inl, whose V this takes.
// Activations' codes are words, int16 [rows][inputs()], of every four inputs 0 2 1 3: in the 32 bits of a column, weights' bytes 0 and 2 are words after a mask, 1 and 3 after a shift.
namespace qforge {
namespace {

// Inputs 0 and 2 (Odd: 1 and 3) of a half of a chunk, of 16 columns
template <Format F, bool Odd>
inline Words word_pairs(const uint8_t *chunk, int half) {
    const auto words = [&](__m256i bytes) {
        constexpr int kByte = Odd ? 8 : 0;
        const int shift = kByte + (F == Format::INT4 && half ? 4 : 0);
        if (shift) bytes = _mm256_srli_epi16(bytes, shift);
        return F == Format::INT4 ? (shift == 12 ? bytes : _mm256_and_si256(bytes, _mm256_set1_epi16(15))) : Odd ? bytes : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
    };
    const Bytes from = V::load_bytes(F == Format::INT4 ? chunk : chunk + 64 * half);
    return {words(from.lo), words(from.hi)};
}

// sum += products over two inputs of a row; written out for the reason that V::add_products gives
inline void add_word_pairs(Words &sum, const Words &w, const int16_t *x) {
    __m256i a, b;
    asm("vpbroadcastd %[x], %[a]\n\tvpmaddwd %[a], %[wl], %[b]\n\tvpmaddwd %[a], %[wh], %[a]\n\tvpaddd %[b], %[sl], %[sl]\n\tvpaddd %[a], %[sh], %[sh]"
        : [sl] "+x"(sum.lo), [sh] "+x"(sum.hi), [a] "=&x"(a), [b] "=&x"(b)
        : [wl] "x"(w.lo), [wh] "x"(w.hi), [x] "m"(*reinterpret_cast<const int16_t(*)[2]>(x)));
}

template <Format F, bool Odd, int R>
inline __attribute__((always_inline)) void add_half_words(Words (&sum)[R], const uint8_t *chunk, const int16_t *const (&row)[R], int64_t at, int half) {
    const Words w = word_pairs<F, Odd>(chunk, half);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) add_word_pairs(sum[r], w, row[r] + 8 * at + 4 * half + 2 * Odd);
}

// sums += products over `chunks` chunks of 8 inputs
template <Format F, int R>
inline __attribute__((always_inline)) void add_words(Words (&sum)[R], const uint8_t *&chunk, const int16_t *x, int64_t inputs, int64_t chunks) {
    const int16_t *row[R];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        row[r] = x + r * inputs;
        asm("" : "+r"(row[r]));  // as V::pointer
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < chunks; ++i, chunk += chunk_bytes(F))
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            add_half_words<F, false, R>(sum, chunk, row, i, half);
            add_half_words<F, true, R>(sum, chunk, row, i, half);
        }
}

template <Format F, bool Z>
struct WordsProduct {
    static constexpr int kLimbs = 1, kMost = 6;  // 12 sums
    const BlockwisePiece &p;
    AllAhead ahead;

    explicit WordsProduct(const BlockwisePiece &piece) : p(piece), ahead(piece.cache) {}
    void begin(const Strip &strip) { ahead.begin(*p.weight, strip); }

    template <int R, int T>
    void compute(int64_t row, int64_t tile) {
        static_assert(T == 1);
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), stride = w.blocks * segments_of_block(w);
        const int16_t *x = reinterpret_cast<const int16_t *>(p.rounded.codes) + row * inputs;
        const float *scale = p.rounded.scales + row * stride, *row_sum = p.rounded.sums + row * w.blocks;
        const int32_t *offset = p.rounded.offsets + row * stride;
        const uint8_t *chunk = chunks_of(w, tile);
        const bool brings = ahead.left();
        Columns total[R][1];
#pragma GCC unroll 6
        for (auto &t : total) t[0] = V::spread(0);
        for (int64_t b = 0; b < w.blocks; ++b) {
            if (brings) ahead.fetch(R * kTile * w.block_k);
            Columns part[R][1];
            for (int64_t left = w.block_k; left > 0; left -= kSegment, ++scale, ++offset) {
                const bool first = left == w.block_k;
                V::put_away(total);
                if (!first) V::put_away(part);
                Words sum[R];
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) sum[r] = V::start_words(Z ? offset[r * stride] : 0);
                if (left >= kSegment) {  // apart, so that its loop has no end to look for
                    add_words<F, R>(sum, chunk, x, inputs, kSegment / 8);
                    x += kSegment;
                } else {
                    add_words<F, R>(sum, chunk, x, inputs, left / 8);
                    x += left;
                }
                const auto add_parts = [&](auto is_first) __attribute__((always_inline)) {
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r) {
                        const Columns by = V::spread(scale[r * stride]), value = V::to_floats(sum[r]);
                        part[r][0] = is_first.value ? V::multiply(by, value) : V::fma(by, value, part[r][0]);
                    }
                };
                if (first) add_parts(std::true_type{});
                else add_parts(std::false_type{});
            }
            add_block<Z>(total, part, w, tile, b, row_sum);
        }
        store(p, total, row, tile);
    }
};

template <Format F>
void all_words(const BlockwisePiece &p) { p.weight->zero < 0 ? all_rows(p, WordsProduct<F, false>(p)) : all_rows(p, WordsProduct<F, true>(p)); }

void words_piece(const BlockwisePiece &p) { p.weight->format == Format::INT4 ? all_words<Format::INT4>(p) : all_words<Format::INT8>(p); }

}  // namespace
}  // namespace qforge
