// Products with activations rounded by segments around a middle for AVX-512 with VNNI where multipliers are scarcer than adders (Zen 4: 512 bits of bytes are multiplied in the time in which
// twice as many are added). Inputs are multiplied by pairs (Winograd, "A new algorithm for inner product", 1968):
//   x1 w1 + x2 w2 = (x1 + w2) (x2 + w1) - x1 x2 - w1 w2
// in which the last two products depend on the row or on the column alone: half of the multiplications. A quarter of the chunks is multiplied plainly, not the same ones in even and in odd tiles: pairs alone would leave
// multipliers idle (a Zen 4: 184 -> 172 cycles for 6 rows x 2 tiles x 64 inputs, whose instructions its four pipes could do in 150). Codes from -120 to 120 and those of 4 bits leave room for the sums in a byte.
// Of a chunk, x1 and w1 are of an input of the first half, x2 and w2 of the second; kept are x1 + kFirstMore, without sign, and x2 - kSecondLess, with one. What that adds depends on the row or on the column alone as well:
//   x1 w1 + x2 w2 = (x1' + w2) (x2' + w1) - x1' x2' - (w1 w2 + kFirstMore w1 - kSecondLess w2), and plainly x1' w1 + x2' w2 - (kFirstMore w1 - kSecondLess w2)
// The column's share is packed with its weights (Weight::pair_sums), the row's is taken from what its sums start with.
// Weights without pair_sums and products of up to four rows, which wait for memory, go through the other AVX-512 kernels. Sums are exact, so bits are equal.
#include "qforge/blockwise.h"
#include "vnni_512.inl"

#include "blocks_x86.inl"
#include "sums_x86.inl"

namespace qforge {
namespace {

constexpr int64_t kLeastPaired = 5;                    // rows of a product
constexpr int64_t kLeastOfPanel = 25, kMostRows = 256;  // rows of a task: from so many on weights are unpacked first; at most

constexpr __mmask16 paired_lanes(int odd) {
    __mmask16 lanes = 0;
    for (int i = 0; i < kCentered / 8; ++i) lanes |= static_cast<__mmask16>(plain_chunk(odd, i) ? 0 : 2 << 2 * i);
    return lanes;
}
constexpr __mmask16 kPaired[2] = {paired_lanes(0), paired_lanes(1)};  // the second half of each chunk that is multiplied by pairs

bool takes(const Weight &w, const RoundedBlocks &rounded) { return w.pair_sums && rounded.rows >= kLeastPaired; }

struct Unpacked {  // a segment of a tile
    alignas(64) uint8_t codes[kCentered / 8][2][64];
    int32_t pair_sums[kTile];
};

int64_t panels_of(const Weight &w) { return kWideTiles * w.inputs() / kCentered; }

void unpack(const uint8_t *chunk, const int32_t *pair_sums, int64_t segments, Unpacked *to) {
    for (; segments > 0; --segments, pair_sums += kTile, ++to) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < kCentered / 8; ++i, chunk += chunk_bytes(Format::INT4))
            for (int half = 0; half < 2; ++half) _mm512_store_si512(to->codes[i][half], V::unpack<Format::INT4>(chunk, half));
        _mm512_store_si512(to->pair_sums, _mm512_loadu_si512(pair_sums));
    }
}

// Panel: weights were unpacked, and their scales made floats. One: a block is a segment, so that there are no parts, and registers hold the sums and most totals of 6 x 2. Else parts begin as 0: with a first segment in code of its own,
// which needs no addition, a Zen 5 takes 94 instead of 78 cycles for 4 rows x 2 tiles x 64 inputs (blocks of 128); 5 and 6 rows are faster at once than as 3 and 2 or 3 where weights are unpacked for each group, not from a panel (a Zen 4).
template <bool Z, bool One, bool Panel>
struct PairedProduct {
    static constexpr int kLimbs = 1, kMost = One || !Panel ? 6 : 4;
    const BlockwisePiece &p;
    Unpacked *panels;  // [tiles of a strip][blocks][segments of a block]
    float *scales;  // [tiles of a strip][blocks][16]
    int64_t first_tile = 0;
    AllAhead ahead;

    PairedProduct(const BlockwisePiece &piece, void *scratch) : p(piece), panels(static_cast<Unpacked *>(scratch)), scales(reinterpret_cast<float *>(panels + panels_of(*piece.weight))), ahead(piece.cache) {}
    void begin(const Strip &strip) {
        const Weight &w = *p.weight;
        ahead.begin(w, strip, w.pair_sums);
        if (!Panel) return;
        first_tile = strip.tile;
        const int64_t segments = w.inputs() / kCentered;
        for (int64_t tile = strip.tile; tile < strip.tile_end; ++tile) {
            make_scales(w, tile, scales + (tile - strip.tile) * w.blocks * kTile);
            unpack(chunks_of(w, tile), w.pair_sums + tile * segments * kTile, segments, panels + (tile - strip.tile) * segments);
        }
    }

    template <int R, int T>  // not in line: with 3 rows, weights would lie on the stack
    [[gnu::noinline]] void compute(int64_t row, int64_t tile) {
        if constexpr (T == 2) multiply<R, T, 0>(row, tile);  // tiles by twos begin with an even one
        else tile % 2 ? multiply<R, T, 1>(row, tile) : multiply<R, T, 0>(row, tile);
    }

  private:
    template <int R, int T, int First>
    inline __attribute__((always_inline)) void multiply(int64_t row, int64_t tile) {
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), segments = inputs / kCentered, tile_step = Panel ? segments * static_cast<int64_t>(sizeof(Unpacked)) : tile_bytes(w);
        const int8_t *x = p.rounded.codes + row * inputs;
        const PairedSegment *n = p.rounded.pairs + row * segments;
        const float *row_sum = p.rounded.sums + row * w.blocks;
        const Unpacked *panel = panels + (tile - first_tile) * segments;
        const uint8_t *from = Panel ? reinterpret_cast<const uint8_t *>(panel) : chunks_of(w, tile);
        const int32_t *pair_sums = Panel ? panel->pair_sums : w.pair_sums + tile * segments * kTile;
        const float *made = Panel ? scales + (tile - first_tile) * w.blocks * kTile : nullptr;
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
                    for (int t = 0; t < T; ++t) sum[r][t] = V::start(n[r * segments].starts[(First + t) % 2]);
#pragma GCC unroll 8
                for (int64_t i = 0; i < kCentered / 8; ++i) {
                    V::Weights lower[T], upper[T];
                    for (int t = 0; t < T; ++t) {
                        const uint8_t *chunk = from + t * tile_step + i * kChunk<Format::INT4, Panel>;
                        lower[t] = Panel ? V::load_bytes(chunk) : V::unpack<Format::INT4>(chunk, 0);
                        upper[t] = Panel ? V::load_bytes(chunk + sizeof(V::Weights)) : V::unpack<Format::INT4>(chunk, 1);
                        asm("" : "+v"(lower[t]), "+v"(upper[t]));  // in registers: GCC would have each of 3 rows read them again, and a group of 3 take longer than one of 4
                    }
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r) {
                        const V::Inputs first = V::inputs(x + r * inputs + 8 * i), second = V::inputs(x + r * inputs + 8 * i + 4);
                        for (int t = 0; t < T; ++t)
                            sum[r][t] = plain_chunk((First + t) % 2, i) ? _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[r][t], first, lower[t]), upper[t], second)
                                                                        : _mm512_dpbusd_epi32(sum[r][t], _mm512_add_epi8(first, upper[t]), _mm512_add_epi8(second, lower[t]));
                    }
                }
            };
            const auto pairs_of = [&](int t) { return _mm512_loadu_si512(pair_sums + t * (Panel ? tile_step / static_cast<int64_t>(sizeof(int32_t)) : segments * kTile)); };
            const auto go_on = [&] {
                ++n;
                x += kCentered;
                pair_sums += Panel ? sizeof(Unpacked) / sizeof(int32_t) : kTile;
                from += Panel ? sizeof(Unpacked) : kCentered / 8 * chunk_bytes(Format::INT4);
            };
            V::Sums sum[R][T];
            if constexpr (One) {  // row by row, so that three registers are enough for what each is multiplied with
                sums(sum);
                V::Integers pairs[T];
                for (int t = 0; t < T; ++t) pairs[t] = pairs_of(t);
                const BlockScales<Z, Panel, T> block(w, tile, b, made);
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
                        const V::Integers pairs = pairs_of(t);
#pragma GCC unroll 6
                        for (int r = 0; r < R; ++r) part[r][t] = V::fma(V::spread(n[r * segments].scale), V::to_floats(V::add_products_of(sum[r][t], pairs, n[r * segments].middle)), part[r][t]);
                    }
                }
                add_block<Z, Panel>(total, part, w, tile, b, row_sum, made);
            }
        }
        store(p, total, row, tile);
    }
};

// Makes a segment's codes those that are multiplied by pairs; returns x1' x2', in the lane of the second half of each chunk
inline __m512i pair(int8_t *codes) {
    constexpr __mmask64 kSecondHalves = 0xF0F0F0F0F0F0F0F0;
    const __m512i x = _mm512_add_epi8(_mm512_loadu_si512(codes), _mm512_mask_set1_epi8(_mm512_set1_epi8(kFirstMore), kSecondHalves, -kSecondLess));
    _mm512_storeu_si512(codes, x);
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_shuffle_epi32(x, _MM_PERM_CDAB), x);
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    blockwise_avx512_vnni.round_rows(w, x, x_stride, rounded, row, row_end, segment, segment_end);
    if (!takes(w, rounded)) return;
    const int64_t inputs = w.inputs(), segments = inputs / kCentered;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    each_walk(w, row, row_end, segment, segment_end, [&](const Walk &walk) {
        const int64_t step = walk.down ? inputs : kCentered, next = walk.down ? segments : 1;
        int8_t *codes = rounded.codes + walk.row * inputs + walk.segment * kCentered;
        int64_t at = walk.row * segments + walk.segment;
        for (int64_t i = 0; i < walk.count; i += 4) {
            const int64_t here = std::min<int64_t>(4, walk.count - i);
            __m512i lanes[4];
            for (int64_t k = 0; k < 4; ++k) lanes[k] = k < here ? pair(codes + (i + k) * step) : _mm512_setzero_si512();
            alignas(16) int32_t sums[2][4];
            for (int odd = 0; odd < 2; ++odd) {
                const auto paired = [&](int64_t k) { return _mm512_maskz_mov_epi32(kPaired[odd], lanes[k]); };
                _mm_store_si128(reinterpret_cast<__m128i *>(sums[odd]), of_quarters(quarters(paired(0), paired(1), paired(2), paired(3), add), add));
            }
            for (int64_t k = 0; k < here; ++k, at += next) {
                const CenteredSegment &from = rounded.centered[at];
                const int32_t start = (w.zero < 0 ? first_bits(w) : from.offset) - kPairsMiddle;
                rounded.pairs[at] = {from.scale, from.magic, from.middle, {start - sums[0][k], start - sums[1][k]}};
            }
        }
    });
}

template <bool Z, bool One>
void some_blocks(const BlockwisePiece &p, void *scratch) { p.row_end - p.row >= kLeastOfPanel ? all_rows(p, PairedProduct<Z, One, true>(p, scratch)) : all_rows(p, PairedProduct<Z, One, false>(p, scratch)); }

template <bool Z>
void any_blocks(const BlockwisePiece &p, void *scratch) { one_segment(*p.weight) ? some_blocks<Z, true>(p, scratch) : some_blocks<Z, false>(p, scratch); }

void piece(const BlockwisePiece &p, void *scratch) {
    const Weight &w = *p.weight;
    if (!takes(w, p.rounded)) return blockwise_avx512_vnni.piece(p, scratch);
    w.zero < 0 ? any_blocks<false>(p, scratch) : any_blocks<true>(p, scratch);
}

int64_t scratch_bytes(const Weight &w) { return w.pair_sums ? panels_of(w) * static_cast<int64_t>(sizeof(Unpacked)) + kWideTiles * w.blocks * kTile * static_cast<int64_t>(sizeof(float)) : 0; }

}  // namespace

constinit const BlockwiseFunctions blockwise_avx512_pairs = {round_rows, piece, 12, kMostRows, scratch_bytes, false};

}  // namespace qforge
