// Products with activations rounded by segments for AMX (compiled with its flags; called only where CPUID and the system have it): one instruction multiplies a segment of 16 rows and 16 columns.
// What it is not made for goes through AVX-512: few rows, segments that are not whole, bytes of weights around another zero point than 128. Bits are equal.
// C: segments are around a middle, and of 64 inputs (else of 32).
#include <algorithm>

#include "amx.inl"
#include "qforge/blockwise.h"
#include "blocks_x86.inl"
#include "sums_x86.inl"

namespace qforge {
namespace {

template <bool C>
constexpr int64_t kWhole = C ? kCentered : kSegment;

// Sums of 16 rows x 16 columns; activations; weights
template <bool C>
constexpr TileConfig kConfig{.columns = {64, 64, kWhole<C>, kWhole<C>, 64, 64}, .rows = {16, 16, 16, 16, kWhole<C> / 4, kWhole<C> / 4}};

// Codes of a tile -> panel [inputs / 4][16 columns][4], less the weight's zero point, or as they are where zero points differ
void unpack(const Weight &w, int64_t tile, int8_t *panel) {
    const int64_t chunks = w.inputs() / 8;
    const uint8_t *from = chunks_of(w, tile);
    if (w.format == Format::INT8) return to_signed(from, chunks * 128, panel);
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(w.zero < 0 ? 0 : w.zero)), mask = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < chunks; ++i, panel += 128) {
        const __m512i both = _mm512_loadu_si512(from + i * 64);
        _mm512_store_si512(panel, _mm512_sub_epi8(_mm512_and_si512(both, mask), zero));
        _mm512_store_si512(panel + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(both, 4), mask), zero));
    }
}

// sums [16][16] = products of a segment: x: one byte of the codes of 16 rows, `stride` bytes apart
inline __attribute__((always_inline)) void multiply(bool odd, const int8_t *x, int64_t stride, const int8_t *panel, int32_t *sums) {
    if (odd) {
        _tile_zero(1);
        _tile_loadd(3, x, stride);
        _tile_loadd(5, panel, 64);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, sums, 64);
    } else {
        _tile_zero(0);
        _tile_loadd(2, x, stride);
        _tile_loadd(4, panel, 64);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, sums, 64);
    }
}

// 16 rows x 1 tile, of which `rows` are wanted; S segments of a block at a time: the whole block, or a part of it
template <int L, bool Z, bool C, int S, bool Whole>
void product(const BlockwisePiece &p, int64_t row, int64_t rows, int64_t tile, const int8_t *panel, WeightAhead &ahead) {
    const Weight &w = *p.weight;
    const int64_t inputs = w.inputs(), of_block = segments_of_block(w), segments = w.blocks * of_block;
    const int8_t *x = p.rounded.codes + row * L * inputs;
    const float *scale = p.rounded.group_scales + row * segments, *row_sum = p.rounded.sums + row * w.blocks;
    const CenteredSegment *n = p.rounded.centered + row * segments;
    const int16_t *code_sums = C ? code_sums_of(w, tile) : nullptr;
    const __m512i zero_sum = _mm512_set1_epi32(Z ? w.zero * static_cast<int>(kCentered) : 0), lower_half = _mm512_set1_epi32(0xFFFF);
    float *y = p.y + row * p.y_stride + tile * kTile;
    int64_t here = 0;  // rows of y that are being brought
    alignas(64) float totals[kRows][kTile], parts[kRows][kTile];
    for (float(&total)[kTile] : totals) _mm512_store_ps(total, _mm512_setzero_ps());
    alignas(64) int32_t sums[2][S * L][kRows][kTile];  // of segments that are added up, and of those after them, which are on their way: 18 instead of 21 ns a segment
    const auto begin = [&](int64_t first) {
        if (first == segments) return;
#pragma GCC unroll 4
        for (int i = 0; i < S * L; ++i) multiply(S == 1 && L == 1 ? first % 2 : i % 2, x + (first + i / L) * kWhole<C> + i % L * inputs, L * inputs, panel + (first + i / L) * kWhole<C> * kTile, sums[first / S % 2][i][0]);
    };
    begin(0);
    for (int64_t b = 0, segment = 0; b < w.blocks; ++b) {
        ahead.fetch();
        for (const int64_t end = std::min(rows, 2 * (b + 1) * rows / w.blocks); here < end; ++here) __builtin_prefetch(y + here * p.y_stride, 1);  // sums would wait behind stores to memory that is not there yet
        const int64_t first = segment, end = segment + of_block, at = (tile * w.blocks + b) * kTile;
        const __m512 weight_scale = block_scales(w, at), zeros = Z ? __m512{} : V::zeros(w.zeros + at);
        for (; segment < end; segment += S, scale += S * kRows) {
            begin(segment + S);
            const auto &sum = sums[segment / S % 2];
            __m512i codes[S];  // sums of a column's, less their zero point
            if constexpr (C)
                for (int i = 0; i < S; ++i) codes[i] = _mm512_and_si512(_mm512_sub_epi32(V::load_words(code_sums + (segment + i) * kTile), zero_sum), lower_half);
#pragma GCC unroll 16
            for (int64_t r = 0; r < kRows; ++r) {
                __m512 part = Whole || segment == first ? _mm512_setzero_ps() : _mm512_load_ps(parts[r]);
#pragma GCC unroll 2
                for (int i = 0; i < S; ++i) {
                    __m512i whole = _mm512_load_si512(sum[i * L][r]);
                    if constexpr (C) whole = V::add_products_of(whole, codes[i], n[r * segments + segment + i].middle);
                    if constexpr (L == 2) whole = V::join(whole, _mm512_load_si512(sum[i * L + 1][r]));
                    part = _mm512_fmadd_ps(_mm512_set1_ps(scale[i * kRows + r]), _mm512_cvtepi32_ps(whole), part);
                }
                if (!Whole && segment + S < end) {
                    _mm512_store_ps(parts[r], part);
                    continue;
                }
                if constexpr (!Z) part = _mm512_fnmadd_ps(zeros, _mm512_set1_ps(row_sum[r * w.blocks + b]), part);
                _mm512_store_ps(totals[r], _mm512_fmadd_ps(weight_scale, part, _mm512_load_ps(totals[r])));
            }
        }
    }
    const int64_t column = tile * kTile;
    for (int64_t r = 0; r < rows; ++r) V::store(y + r * p.y_stride, _mm512_load_ps(totals[r]), w.bias ? w.bias + column : nullptr, w.columns - column);
}

template <int L, bool Z, bool C>
void all_groups(const BlockwisePiece &p, int8_t *panel) {
    const Configured tiles(kConfig<C>);
    const Weight &w = *p.weight;
    const int64_t segments = segments_of_block(w);
    const auto part = segments % 2 ? product<L, Z, C, 1, false> : product<L, Z, C, 2, false>;
    const auto run = segments == 1 ? product<L, Z, C, 1, true> : segments == 2 ? product<L, Z, C, 2, true> : part;
    const int64_t rows = p.row_end - p.row, groups = (rows + kRows - 1) / kRows;
    for (int64_t tile = p.tile; tile < p.tile_end; ++tile) {
        const Strip strip{tile, tile + 1, rows, groups};
        WeightAhead ahead;
        ahead.begin(w, strip);
        unpack(w, tile, panel);
        for_groups(p.row, p.row_end, [&](int64_t row, int64_t rows) { run(p, row, rows, tile, panel, ahead); });
    }
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedBlocks &rounded, int64_t row, int64_t row_end, int64_t segment, int64_t segment_end) {
    blockwise_avx512_vnni.round_rows(w, x, x_stride, rounded, row, row_end, segment, segment_end);
    const int64_t segments = w.blocks * segments_of_block(w);
    for (int64_t r = row; r < row_end; ++r)
        for (int64_t s = segment; s < segment_end; ++s) rounded.group_scales[(r / kRows * segments + s) * kRows + r % kRows] = centered(w) ? rounded.centered[r * segments + s].scale : rounded.scales[r * segments + s];
}

void piece(const BlockwisePiece &p, void *scratch) {
    const Weight &w = *p.weight;
    const int64_t rows = p.row_end - p.row;
    if (rows < kRows || w.block_k % segment_inputs(w) || (w.format == Format::INT8 && w.zero != 128)) return blockwise_avx512_vnni.piece(p, scratch);
    auto *panel = static_cast<int8_t *>(scratch);
    BlockwisePiece groups = p, rest = p;
    groups.row_end = rest.row = p.row + rows_of_groups(rows);
    const bool z = w.zero >= 0;
    const auto run = limbs(w) == 2 ? (z ? all_groups<2, true, false> : all_groups<2, false, false>) :
                     centered(w) ? (z ? all_groups<1, true, true> : all_groups<1, false, true>) : (z ? all_groups<1, true, false> : all_groups<1, false, false>);
    run(groups, panel);
    if (rest.row < rest.row_end) blockwise_avx512_vnni.piece(rest, scratch);
}

}  // namespace

constinit const BlockwiseFunctions blockwise_amx = {round_rows, piece, kRows, kMostRows, panel_bytes, false};

}  // namespace qforge
