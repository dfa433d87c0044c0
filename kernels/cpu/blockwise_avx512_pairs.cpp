// Products with activations rounded by segments around a middle for AVX-512 with VNNI where multipliers are scarcer than adders (Zen 4: 512 bits of bytes are multiplied in the time in which
// twice as many are added). Inputs are multiplied by pairs (Winograd, "A new algorithm for inner product", 1968):
//   x1 w1 + x2 w2 = (x1 + w2) (x2 + w1) - x1 x2 - w1 w2
// in which the last two products depend on the row or on the column alone: half of the multiplications. A quarter of the chunks is multiplied plainly, not the same ones in even and in odd tiles: pairs alone would leave
// multipliers idle (a Zen 4: 184 -> 172 cycles for 6 rows x 2 tiles x 64 inputs, whose instructions its four pipes could do in 150). Codes from -120 to 120 and those of 4 bits leave room for the sums in a byte.
// Few rows, blocks that are not whole segments, and other weights go through the other AVX-512 kernels. Sums are exact, so bits are equal.
#include "qforge/blockwise.h"
#include "vnni_512.inl"

#include "blocks_x86.inl"
#include "sums_x86.inl"

namespace qforge {
namespace {

constexpr int64_t kLeastRows = 16, kMostRows = 256;  // of a task: they share what is made of a strip
// Of a chunk, w1 is the code of an input of the first half, w2 of the second; in a byte without sign go x1 + w2 + kFirstMore, with sign x2 + w1 - kSecondLess.
constexpr int kFirstMore = 120, kSecondLess = 8;

constexpr bool plain(int odd, int64_t chunk) { return odd ? chunk == 3 || chunk == 5 : chunk == 1 || chunk == 6; }  // far from a segment's ends, which have multiplications enough

constexpr __mmask16 paired_lanes(int odd) {
    __mmask16 lanes = 0;
    for (int64_t i = 0; i < kCentered / 8; ++i) lanes |= static_cast<__mmask16>(plain(odd, i) ? 0 : 3 << 2 * i);
    return lanes;
}
constexpr __mmask16 kPaired[2] = {paired_lanes(0), paired_lanes(1)};

bool takes(const Weight &w) { return centered(w) && w.block_k % kCentered == 0; }

struct Panel {  // a segment of a tile
    alignas(64) uint8_t codes[kCentered / 8][2][64];  // of a chunk w1 - kSecondLess, and w2 + kFirstMore; of a plain one w1 and w2
    int32_t pairs[kTile];                             // lower 16 bits: sum of codes; upper ones: - (sum of the products of those bytes in chunks that are not plain), of which 6 fit
};

int64_t panels_of(const Weight &w) { return kWideTiles * w.inputs() / kCentered; }

template <int Odd>
void unpack(const uint8_t *chunk, const int16_t *code_sums, Panel &to) {
    const __m512i mask = _mm512_set1_epi8(15), less = _mm512_set1_epi8(kSecondLess), more = _mm512_set1_epi8(kFirstMore);
    __m512i products = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int64_t i = 0; i < kCentered / 8; ++i) {
        const __m512i both = _mm512_loadu_si512(chunk + i * 64), first = _mm512_and_si512(both, mask), second = _mm512_and_si512(_mm512_srli_epi32(both, 4), mask);
        const __m512i lower = plain(Odd, i) ? first : _mm512_sub_epi8(first, less), upper = plain(Odd, i) ? second : _mm512_add_epi8(second, more);
        if (!plain(Odd, i)) products = _mm512_dpbusd_epi32(products, upper, lower);
        _mm512_store_si512(to.codes[i][0], lower);
        _mm512_store_si512(to.codes[i][1], upper);
    }
    const __m512i of_column = _mm512_sub_epi32(_mm512_setzero_si512(), products);
    _mm512_store_si512(to.pairs, _mm512_or_si512(_mm512_slli_epi32(of_column, 16), V::load_words(code_sums)));
}

// One: a block is a segment, so that there are no parts, and registers hold the sums and most totals of 6 x 2. Else parts begin as 0: with a first segment in code of its own, which needs no addition, a Zen 5 takes
// 94 instead of 78 cycles for 4 rows x 2 tiles x 64 inputs (blocks of 128).
template <bool Z, bool One>
struct PairedProduct {
    static constexpr int kLimbs = 1, kMost = One ? 6 : 4;
    const BlockwisePiece &p;
    Panel *panels;  // [tiles of a strip][blocks][segments of a block]
    float *scales;  // [tiles of a strip][blocks][16]
    int64_t first_tile = 0;
    AllAhead ahead;

    PairedProduct(const BlockwisePiece &piece, void *scratch) : p(piece), panels(static_cast<Panel *>(scratch)), scales(reinterpret_cast<float *>(panels + panels_of(*piece.weight))), ahead(piece.cache) {}
    void begin(const Strip &strip) {  // never a stream: more rows than one group has
        const Weight &w = *p.weight;
        ahead.begin(w, strip);
        first_tile = strip.tile;
        const int64_t segments = w.inputs() / kCentered;
        Panel *to = panels;
        for (int64_t tile = strip.tile; tile < strip.tile_end; ++tile) {
            const auto run = (tile - strip.tile) % 2 ? unpack<1> : unpack<0>;
            make_scales(w, tile, scales + (tile - strip.tile) * w.blocks * kTile);
            for (int64_t s = 0; s < segments; ++s) run(chunks_of(w, tile) + s * kCentered / 8 * chunk_bytes(Format::INT4), code_sums_of(w, tile) + s * kTile, *to++);
        }
    }

    template <int R, int T>  // not in line: with 3 rows, weights would lie on the stack
    [[gnu::noinline]] void compute(int64_t row, int64_t tile) {  // kLeastRows leave no group of 1 or 2 rows, so tiles come by twos, from an even one on
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), segments = inputs / kCentered;
        const int8_t *x = p.rounded.codes + row * inputs;
        const PairedSegment *n = p.rounded.pairs + row * segments;
        const float *row_sum = p.rounded.sums + row * w.blocks;
        const Panel *panel = panels + (tile - first_tile) * segments;
        const float *made = scales + (tile - first_tile) * w.blocks * kTile;
        V::Floats total[R][T];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) total[r][t] = V::spread(0);
        const bool brings = ahead.left();
        for (int64_t b = 0; b < w.blocks; ++b) {
            if (brings) ahead.fetch(R * T * kTile * w.block_k);
            const auto sums = [&](V::Sums (&sum)[R][T]) __attribute__((always_inline)) {
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    for (int t = 0; t < T; ++t) sum[r][t] = V::start(n[r * segments].starts[t]);
#pragma GCC unroll 8
                for (int64_t i = 0; i < kCentered / 8; ++i) {
                    V::Weights lower[T], upper[T];
                    for (int t = 0; t < T; ++t) {
                        lower[t] = _mm512_load_si512(panel[t * segments].codes[i][0]);
                        upper[t] = _mm512_load_si512(panel[t * segments].codes[i][1]);
                        asm("" : "+v"(lower[t]), "+v"(upper[t]));  // in registers: GCC would have each of 3 rows read them again, and a group of 3 take longer than one of 4
                    }
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r) {
                        const V::Inputs first = V::inputs(x + r * inputs + 8 * i), second = V::inputs(x + r * inputs + 8 * i + 4);
                        for (int t = 0; t < T; ++t)
                            sum[r][t] = plain(t, i) ? _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[r][t], lower[t], first), upper[t], second)
                                                          : _mm512_dpbusd_epi32(sum[r][t], _mm512_add_epi8(first, upper[t]), _mm512_add_epi8(second, lower[t]));
                    }
                }
            };
            const auto go_on = [&] { ++n, ++panel, x += kCentered; };
            V::Sums sum[R][T];
            V::Integers pairs[T];
            if constexpr (One) {  // row by row, so that three registers are enough for what each is multiplied with
                sums(sum);
                for (int t = 0; t < T; ++t) pairs[t] = _mm512_load_si512(panel[t * segments].pairs);
                const BlockScales<Z, true, T> block(w, tile, b, made);
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    const V::Floats by = V::spread(n[r * segments].scale), magic = V::spread(n[r * segments].magic);
                    V::Floats part[T];
                    for (int t = 0; t < T; ++t) part[t] = V::fma_less(by, V::as_floats(V::add_products_of(sum[r][t], pairs[t], n[r * segments].middle)), magic);
                    block.add(total[r], part, row_sum + r * w.blocks + b);
                }
                go_on();
            } else {
                V::Floats part[R][T];
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    for (int t = 0; t < T; ++t) part[r][t] = V::spread(0);
                for (int64_t left = w.block_k; left > 0; left -= kCentered, go_on()) {
                    sums(sum);
                    for (int t = 0; t < T; ++t) {
                        pairs[t] = _mm512_load_si512(panel[t * segments].pairs);
#pragma GCC unroll 6
                        for (int r = 0; r < R; ++r) part[r][t] = V::fma(V::spread(n[r * segments].scale), V::to_floats(V::add_products_of(sum[r][t], pairs[t], n[r * segments].middle)), part[r][t]);
                    }
                }
                add_block<Z, true>(total, part, w, tile, b, row_sum, made);
            }
        }
        store(p, total, row, tile);
    }
};

// Of a segment of a row what its pairs have too much, two lanes for each chunk
inline __m512i too_much(const int8_t *codes) {
    constexpr __mmask64 second_half = 0xF0F0F0F0F0F0F0F0;
    const __m512i x = _mm512_loadu_si512(codes), more = _mm512_set1_epi8(kFirstMore), less = _mm512_maskz_set1_epi8(~second_half, kSecondLess), zero = _mm512_setzero_si512();
    const __m512i first = _mm512_maskz_add_epi8(second_half, _mm512_shuffle_epi32(x, _MM_PERM_CDAB), more);  // beside x2: x1 + kFirstMore
    return _mm512_sub_epi32(_mm512_dpbusd_epi32(zero, first, x), _mm512_dpbusd_epi32(zero, less, x));
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    blockwise_avx512_vnni.round_rows(w, x, x_stride, rounded, row, row_end, segment, segment_end);
    if (!takes(w)) return;
    const int64_t inputs = w.inputs(), segments = inputs / kCentered;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    each_walk(w, row, row_end, segment, segment_end, [&](const Walk &walk) {
        const int64_t step = walk.down ? inputs : kCentered, next = walk.down ? segments : 1;
        const int8_t *codes = rounded.codes + walk.row * inputs + walk.segment * kCentered;
        int64_t at = walk.row * segments + walk.segment;
        for (int64_t i = 0; i < walk.count; i += 4) {
            const int64_t here = std::min<int64_t>(4, walk.count - i);
            __m512i lanes[4];
            for (int64_t k = 0; k < 4; ++k) lanes[k] = too_much(codes + (i + std::min(k, here - 1)) * step);
            alignas(16) int32_t sums[2][4];
            for (int odd = 0; odd < 2; ++odd) {
                const auto paired = [&](int64_t k) { return _mm512_maskz_mov_epi32(kPaired[odd], lanes[k]); };
                _mm_store_si128(reinterpret_cast<__m128i *>(sums[odd]), of_quarters(quarters(paired(0), paired(1), paired(2), paired(3), add), add));
            }
            for (int64_t k = 0; k < here; ++k, at += next) {
                const CenteredSegment &from = rounded.centered[at];
                const int32_t start = w.zero < 0 ? first_bits(w) : from.offset;
                rounded.pairs[at] = {from.scale, from.magic, from.middle, {start - sums[0][k], start - sums[1][k]}};
            }
        }
    });
}

template <bool Z>
void any_blocks(const BlockwisePiece &p, void *scratch) { one_segment(*p.weight) ? all_rows(p, PairedProduct<Z, true>(p, scratch)) : all_rows(p, PairedProduct<Z, false>(p, scratch)); }

void piece(const BlockwisePiece &p, void *scratch) {
    const Weight &w = *p.weight;
    if (!takes(w) || p.row_end - p.row < kLeastRows) return blockwise_avx512_vnni.piece(p, scratch);
    w.zero < 0 ? any_blocks<false>(p, scratch) : any_blocks<true>(p, scratch);
}

int64_t scratch_bytes(const Weight &w) { return takes(w) ? panels_of(w) * static_cast<int64_t>(sizeof(Panel)) + kWideTiles * w.blocks * kTile * static_cast<int64_t>(sizeof(float)) : 0; }

}  // namespace

constinit const BlockwiseFunctions blockwise_avx512_pairs = {round_rows, piece, 12, kMostRows, scratch_bytes, false};

}  // namespace qforge
