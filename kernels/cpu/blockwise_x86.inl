// Products with activations rounded by segments (blockwise.h), written once for the instruction sets of x86. The file that includes this gives
//   largest_bits(x, inputs): the bits of the largest magnitude; largest_bits_of_four(x, x_step, bits): the same for four whole segments, x_step inputs apart;
//   for segments around a middle extremes(x, inputs), extremes_of_four(x, x_step, high, low), round_centered(x, inputs, inverse, middle, bytes) -> sum of those bytes, round_four_centered(x, x_step, inverses, middles, bytes, byte_step, sums);
//   for others round_segment<bytes of a code>(x, inputs, inverse, high bytes, low bytes) -> CodeSums, and round_four(x, x_step, inverses, bytes, byte_step, sums): four segments' codes of one byte, or false where it leaves them to round_segment;
//   where V::kWords instead round_words(x, inputs, inverse, words) -> sum of codes;  where V::kNarrow narrow_starts(bytes, inputs) -> CenteredSegment::starts;
//   V: 16 columns side by side (sums_x86.inl), V::Floats, V::Integers; V::kCodeRows<F, bytes of a code>: code rows whose sums its registers hold; V::kByMagic: whether sums of a block that is one segment become floats by kMagic;
//   V::kNarrow: whether V::Sums of a segment around a middle are narrow (blockwise.h); V::kPanels: whether tiles are unpacked first where rows are many; V::kWords: whether codes without a middle are words.
#include <immintrin.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "qforge/blockwise.h"
#include "blocks_x86.inl"
#include "sums_x86.inl"

namespace qforge {
namespace {

// ---- rounding ----

static_assert(sizeof(CodeSums) == 8);  // round_four stores two at once
constexpr int64_t kAtOnce = 64;  // segments: what one of them waits for (its largest magnitude, a division) is found for many before the next step

// The bits of floats as integers that rise with the values (-0 below 0, infinities and NaNs outermost), and back
inline int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

struct Roundings {  // of as many segments as are measured at once
    float scale[kAtOnce];
    float inverse[kAtOnce];  // 0: codes are 0
    int32_t middle[kAtOnce];
};

// How codes are kept: around a middle, as a byte, as two bytes apart, as a word (V::kWords)
enum class Kept { CENTERED, BYTE, TWO_BYTES, WORD };

// Where the segments of a walk are
template <int64_t Whole, typename Code>
struct Places {
    const float *x;
    Code *codes;
    int64_t x_step, code_step;  // from one to the next, where all are whole
    int64_t block_k, in_block;
    bool whole;

    int64_t inputs(int64_t i) const { return whole ? Whole : std::min(Whole, block_k - i % in_block * Whole); }
    const float *from(int64_t i) const { return x + at(i, x_step); }
    Code *to(int64_t i) const { return codes + at(i, code_step); }

  private:
    int64_t at(int64_t i, int64_t step) const { return whole ? i * step : i / in_block * block_k + i % in_block * Whole; }
};

// most: the largest code
template <typename Code>
void measure(const Places<kSegment, Code> &places, float most, int64_t done, int64_t here, int64_t fours, Roundings &to) {
    constexpr uint32_t kInfinity = 0x7F800000;  // NaNs' bits are larger
    uint32_t bits[kAtOnce];
    for (int64_t i = 0; i < fours; i += 4) largest_bits_of_four(places.from(done + i), places.x_step, bits + i);
    for (int64_t i = fours; i < here; ++i) bits[i] = largest_bits(places.from(done + i), places.inputs(done + i));
    for (int64_t i = 0; i < here; ++i) {
        const float m = __builtin_bit_cast(float, bits[i]);
        const bool finite = bits[i] < kInfinity, has_codes = finite && m >= 0x1p-100f;
        to.scale[i] = has_codes ? m / most : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        to.inverse[i] = has_codes ? most / m : 0.0f;
        to.middle[i] = 0;
    }
}

void measure_centered(const Places<kCentered, int8_t> &places, int64_t done, int64_t here, int64_t fours, Roundings &to) {
    constexpr int32_t kInfinity = 0x7F800000, kMinusInfinity = ~kInfinity;  // ordered
    int32_t high[kAtOnce], low[kAtOnce];
    for (int64_t i = 0; i < fours; i += 4) extremes_of_four(places.from(done + i), places.x_step, high + i, low + i);
    for (int64_t i = fours; i < here; ++i) {
        const Extremes e = extremes(places.from(done + i), places.inputs(done + i));
        high[i] = e.high;
        low[i] = e.low;
    }
    for (int64_t i = 0; i < here; ++i) {
        const float h = __builtin_bit_cast(float, ordered(high[i])), l = __builtin_bit_cast(float, ordered(low[i]));
        const float half = std::max(h * 0.5f - l * 0.5f, std::max(__builtin_fabsf(h), __builtin_fabsf(l)) * kCenteredLeast);
        const bool finite = high[i] < kInfinity && low[i] > kMinusInfinity && half < kCenteredHuge, has_codes = finite && half >= 0x1p-100f;
        to.scale[i] = has_codes ? without_last_bits(half / kCenteredMost) : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        to.inverse[i] = has_codes ? kCenteredMost / half : 0.0f;
        to.middle[i] = has_codes ? static_cast<int32_t>(__builtin_nearbyintf((h * 0.5f + l * 0.5f) * to.inverse[i])) : 0;
    }
}

// x: from the walk's first segment on
template <Kept K>
void round_walk(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &out, const Walk &walk) {
    constexpr bool kMiddle = K == Kept::CENTERED;
    constexpr int64_t kWhole = kMiddle ? kCentered : kSegment, L = K == Kept::TWO_BYTES ? 2 : 1;
    using Code = std::conditional_t<K == Kept::WORD, int16_t, int8_t>;
    const int64_t inputs = w.inputs(), in_block = segments_of_block(w), segments = w.blocks * in_block, step = walk.down ? segments : 1;
    const Places<kWhole, Code> places{x, reinterpret_cast<Code *>(out.codes) + walk.row * L * inputs + first_input(w, walk.segment), walk.down ? x_stride : kWhole, walk.down ? L * inputs : kWhole, w.block_k, in_block, w.block_k % kWhole == 0};
    const int32_t bits = V::kByMagic ? first_bits(w) : 0;
    int64_t at = walk.row * segments + walk.segment;
    for (int64_t done = 0; done < walk.count; done += kAtOnce) {
        const int64_t here = std::min(kAtOnce, walk.count - done), fours = places.whole ? here / 4 * 4 : 0;
        Roundings to;
        CodeSums codes[kAtOnce];
        if constexpr (kMiddle) measure_centered(places, done, here, fours, to);
        else measure(places, limbs(w) == 2 ? 32512.0f : 127.0f, done, here, fours, to);
        for (int64_t i = 0; i < here;) {
            const float *from = places.from(done + i);
            Code *high = places.to(done + i);
            if (i + 4 <= fours) {
                bool four = false;
                if constexpr (kMiddle) four = round_four_centered(from, places.x_step, to.inverse + i, to.middle + i, high, places.code_step, codes + i);
                else if constexpr (K == Kept::BYTE) four = round_four(from, places.x_step, to.inverse + i, high, places.code_step, codes + i);
                if (four) {
                    i += 4;
                    continue;
                }
            }
            const int64_t length = places.inputs(done + i);
            if constexpr (kMiddle) codes[i].all = round_centered(from, length, to.inverse[i], to.middle[i], high) + to.middle[i] * static_cast<int32_t>(length);
            else if constexpr (K == Kept::WORD) codes[i].all = round_words(from, length, to.inverse[i], high);
            else codes[i] = round_segment<L>(from, length, to.inverse[i], high, L == 2 ? high + inputs : nullptr);
            ++i;
        }
        for (int64_t i = 0; i < here; ++i, at += step) {
            if constexpr (kMiddle) {
                CenteredSegment &n = out.centered[at] = {to.scale[i], {to.scale[i] * kMagic}, bits - w.zero * codes[i].all, 1 << 16 | (to.middle[i] & 0xFFFF)};
                if constexpr (V::kNarrow) {
                    const int32_t length = static_cast<int32_t>(places.inputs(done + i)), zero = std::max(w.zero, 0);
                    n.starts = narrow_starts(places.to(done + i), length);
                    n.offset = (kNarrowLess - zero) * (codes[i].all - to.middle[i] * length) + (kNarrowSum - zero * length) * to.middle[i];
                }
            } else {
                out.scales[at] = to.scale[i];
                out.offsets[at * L] = -w.zero * (L == 2 ? codes[i].high : codes[i].all);
                if (L == 2) out.offsets[at * L + 1] = -w.zero * (codes[i].all - 256 * codes[i].high);
            }
            if (w.zero >= 0) continue;
            float &sum = out.sums[at / in_block];
            sum = __builtin_fmaf(to.scale[i], static_cast<float>(codes[i].all), at % in_block ? sum : 0.0f);
        }
    }
}

template <bool Words>
auto walk_of(const Weight &w) {
    if constexpr (Words) return centered(w) ? round_walk<Kept::CENTERED> : round_walk<Kept::WORD>;
    else return centered(w) ? round_walk<Kept::CENTERED> : limbs(w) == 2 ? round_walk<Kept::TWO_BYTES> : round_walk<Kept::BYTE>;
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    const auto run = walk_of<V::kWords>(w);
    each_walk(w, row, row_end, segment, segment_end, [&](const Walk &walk) { run(w, x + (walk.row - row) * x_stride + first_input(w, walk.segment) - first_input(w, segment), x_stride, rounded, walk); });
}

// ---- product ----

// part = fma(scale of the row's segment, sum over `chunks` chunks, part) for R rows x T tiles; First: part = scale * sum; Magic: the same, with sums that start with kMagicBits. Two: in two parts, the first of 32 inputs; Offset: sums have one
template <bool Offset, bool First, bool Magic, bool Two, bool Panel, int R, int T>
inline __attribute__((always_inline)) void add_centered(V::Floats (&part)[R][T], const uint8_t *(&chunk)[T], const int8_t *x, int64_t inputs, int64_t chunks, const CenteredSegment *n, int64_t stride, const int16_t *const (&code_sums)[T]) {
    static_assert(First || !Magic);
    static_assert(!V::kNarrow || (!Two && !Magic));
    constexpr Format F = Format::INT4;
    V::Sums sum[R][T];
    V::Integers before[R][T];
    constexpr int32_t kNone = Magic ? kMagicBits : 0;  // in the place of an offset
    const auto offset = [&](int c) { return Offset ? n[c * stride].offset : kNone; };
    start_sums(sum, [&](int c) { return V::kNarrow ? n[c * stride].starts : offset(c); });
    constexpr bool kMade = makes_sums(R);
    V::Weights bytes[T] = {};  // each the sum of a column's codes of every fourth input: 16 of them at most
    const auto add = [&](const int8_t *from, int64_t count) __attribute__((always_inline)) {
        if constexpr (kMade) add_chunks<F, Panel, R, T>(sum, chunk, from, inputs, count, bytes);
        else add_chunks<F, Panel, R, T>(sum, chunk, from, inputs, count);
    };
    if constexpr (Two) {
        add(x, kSegment / 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) before[r][t] = V::whole(sum[r][t], offset(r));
        V::put_away(before);
        start_sums(sum, [](int) { return 0; });
        add(x + kSegment, chunks - kSegment / 8);
    } else {
        add(x, chunks);
    }
    for (int t = 0; t < T; ++t) {
        const V::Integers codes = kMade ? V::sums_of(bytes[t]) : V::load_words(code_sums[t]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            V::Integers whole = V::whole(sum[r][t], Two ? 0 : offset(r));
            if constexpr (Two) whole = V::add(before[r][t], whole);
            whole = V::add_products_of(whole, codes, n[r * stride].middle);
            const V::Floats by = V::spread(n[r * stride].scale);
            if constexpr (Magic) part[r][t] = V::fma_less(by, V::as_floats(whole), V::spread(n[r * stride].magic));
            else part[r][t] = First ? V::multiply(by, V::to_floats(whole)) : V::fma(by, V::to_floats(whole), part[r][t]);
        }
    }
}

// Behind a tile's unpacked codes
inline float *panel_scales(const Weight &w, uint8_t *panel) { return reinterpret_cast<float *>(panel + w.inputs() * kTile); }

// One: a block is a segment. Else parts begin with its first segment, in code of its own where they are put away, or as 0. Panel: weights are those of one tile that were unpacked before, and behind them its scales.
template <bool Z, bool Offset, bool One, bool Panel>
struct CenteredProduct {
    static constexpr int kLimbs = 1, kMost = V::kCodeRows<Format::INT4, 1>;
    const BlockwisePiece &p;
    uint8_t *panel;
    AllAhead ahead;

    CenteredProduct(const BlockwisePiece &piece, uint8_t *unpacked) : p(piece), panel(unpacked), ahead(piece.cache) {}
    void begin(const Strip &strip) { ahead.begin(*p.weight, strip); }

    template <int R, int T>
    void compute(int64_t row, int64_t tile) {
        constexpr bool kTwo = !V::kNarrow && R * T <= 2;  // or sums would wait for themselves
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), stride = w.blocks * segments_of_block(w);
        const int8_t *x = p.rounded.codes + row * inputs;
        const float *row_sum = p.rounded.sums + row * w.blocks;
        const CenteredSegment *n = p.rounded.centered + row * stride;
        const uint8_t *chunk[T];
        const int16_t *code_sums[T];
        V::Floats total[R][T];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) total[r][t] = V::spread(0);
        for (int t = 0; t < T; ++t) {
            chunk[t] = Panel ? panel : chunks_of(w, tile + t);
            code_sums[t] = code_sums_of(w, tile + t);
        }
        const auto go_on = [&](int64_t by) {
            x += by;
            for (int t = 0; t < T; ++t) code_sums[t] += kTile;
            ++n;
        };
        const bool brings = ahead.left();
        RowsNear<R, 1> near(w, {x, n}, {R * inputs, R * stride * static_cast<int64_t>(sizeof(*n))});
        for (int64_t b = 0; b < w.blocks; ++b) {
            if (brings) ahead.fetch(R * T * kTile * w.block_k);
            near.touch(x, inputs, w.block_k);
            V::Floats part[R][T];
            V::put_away(total);
            if constexpr (One) {
                add_centered<Offset, true, V::kByMagic, kTwo, Panel>(part, chunk, x, inputs, kCentered / 8, n, stride, code_sums);
                go_on(kCentered);
            } else {
                int64_t left = w.block_k;
                if (!V::kAway || left < kCentered)
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r)
                        for (int t = 0; t < T; ++t) part[r][t] = V::spread(0);
                for (; left >= kCentered; left -= kCentered, go_on(kCentered)) {
                    if (V::kAway && left == w.block_k) {
                        add_centered<Offset, true, false, kTwo, Panel>(part, chunk, x, inputs, kCentered / 8, n, stride, code_sums);
                    } else {
                        V::put_away(part);
                        add_centered<Offset, false, false, kTwo, Panel>(part, chunk, x, inputs, kCentered / 8, n, stride, code_sums);
                    }
                }
                if (left > 0) {
                    V::put_away(part);
                    add_centered<Offset, false, false, false, Panel>(part, chunk, x, inputs, left / 8, n, stride, code_sums);
                    go_on(left);
                }
            }
            add_block<Z, Panel>(total, part, w, tile, b, row_sum, Panel ? panel_scales(w, panel) : nullptr);
        }
        store(p, total, row, tile);
    }
};

constexpr int64_t kPanelGroups = 6;  // groups of rows for which a tile is unpacked first; for three it takes 4 % longer than it saves

// One that nobody calls where !V::kPanels is not made
template <typename Bytes = V::Weights>
void unpack_tile(const Weight &w, int64_t tile, uint8_t *panel) {
    make_scales(w, tile, panel_scales(w, panel));
    const uint8_t *chunk = chunks_of(w, tile), *end = chunk + tile_bytes(w);
    for (; chunk < end; chunk += chunk_bytes(Format::INT4))
        for (int half = 0; half < 2; ++half, panel += sizeof(Bytes)) V::store_bytes(panel, V::unpack<Format::INT4>(chunk, half));
}

template <bool Z, bool Offset, bool One>
void all_centered(const BlockwisePiece &p, uint8_t *panel) {
    if constexpr (V::kPanels) {
        using Product = CenteredProduct<Z, Offset, One, true>;
        if (groups_of<Product>(p) >= kPanelGroups) return all_rows<1>(p, Product(p, panel), [&](int64_t tile) { unpack_tile(*p.weight, tile, panel); });
    }
    all_rows(p, CenteredProduct<Z, Offset, One, false>(p, nullptr));
}

template <bool Z, bool Offset>
void any_blocks(const BlockwisePiece &p, uint8_t *panel) { one_segment(*p.weight) ? all_centered<Z, Offset, true>(p, panel) : all_centered<Z, Offset, false>(p, panel); }

void centered_piece(const BlockwisePiece &p, void *scratch) {
    const Weight &w = *p.weight;
    auto *panel = static_cast<uint8_t *>(scratch);
    if (w.zero < 0) return any_blocks<false, V::kNarrow>(p, panel);  // narrow sums are less by 8 times the codes' sum, also where zero points differ
    V::kNarrow && narrow_without_offset(w) ? any_blocks<true, !V::kNarrow>(p, panel) : any_blocks<true, true>(p, panel);
}

}  // namespace
}  // namespace qforge
