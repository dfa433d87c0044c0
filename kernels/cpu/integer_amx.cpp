// The integer product for AMX (compiled with its flags; called only where CPUID and the system have it): see integer.h. One instruction multiplies 64 or 32 inputs of 16 rows and 16 columns.
// What it is not made for goes through AVX-512: few rows, runs of another length, bytes of weights around another zero point than 128.
#include "amx.inl"
#include "qforge/integer.h"

namespace qforge {
namespace {

// Sums, activations, weights; the instruction takes K inputs
template <int K>
constexpr TileConfig kConfig{.columns = {64, K, 64}, .rows = {16, 16, K / 4}};

// Codes of a tile -> panel [inputs / 4][16 columns][4], less the zero points of each column's run
void unpack(const Weight &w, int64_t tile, int8_t *panel) {
    const int64_t chunks = w.inputs() / 8;
    const uint8_t *from = w.codes + tile * chunks * chunk_bytes(w.format);
    if (w.format == Format::INT8) return to_signed(from, chunks * 128, panel);
    const __m512i mask = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < w.blocks; ++b) {
        const __m128i zeros = _mm_loadu_si128(reinterpret_cast<const __m128i *>(w.zeros + (tile * w.blocks + b) * kTile));
        const __m512i zero = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(zeros), _mm512_set1_epi32(0x01010101));
        for (int64_t i = 0; i < w.block_k / 8; ++i, from += 64, panel += 128) {
            const __m512i both = _mm512_loadu_si512(from);
            _mm512_store_si512(panel, _mm512_sub_epi8(_mm512_and_si512(both, mask), zero));
            _mm512_store_si512(panel + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi32(both, 4), mask), zero));
        }
    }
}

// 16 rows x 1 tile, of which `rows` are wanted
template <int K>
void product(const IntegerPiece &p, int64_t row, int64_t rows, int64_t tile, const int8_t *panel) {
    const Weight &w = *p.weight;
    const int64_t inputs = w.inputs(), run = w.run * w.block_k;
    const int8_t *x = static_cast<const int8_t *>(p.codes) + row * inputs;
    alignas(64) float total[kRows][kTile] = {};
    alignas(64) int32_t sums[kRows][kTile];
    for (int64_t b = 0; b < w.blocks; b += w.run) {
        _tile_zero(0);
        for (int64_t i = 0; i < run; i += K, x += K, panel += K * kTile) {
            _tile_loadd(1, x, inputs);
            _tile_loadd(2, panel, 64);
            _tile_dpbssd(0, 1, 2);
        }
        _tile_stored(0, sums, 64);
        const __m512 scale = _mm512_loadu_ps(w.scales + (tile * w.blocks + b) * kTile);
        for (int64_t r = 0; r < kRows; ++r) _mm512_store_ps(total[r], _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(_mm512_load_si512(sums[r])), _mm512_load_ps(total[r])));
    }
    const int64_t column = tile * kTile;
    for (int64_t r = 0; r < rows; ++r)
        V::store(p.y + (row + r) * p.y_stride + column, _mm512_mul_ps(_mm512_load_ps(total[r]), _mm512_set1_ps(p.scales[row + r])), w.bias ? w.bias + column : nullptr, w.columns - column);
}

template <int K>
void all_rows(const IntegerPiece &p, int8_t *panel) {
    const Configured tiles(kConfig<K>);
    for (int64_t tile = p.tile; tile < p.tile_end; ++tile) {
        unpack(*p.weight, tile, panel);
        for_groups(p.row, p.row_end, [&](int64_t row, int64_t rows) { product<K>(p, row, rows, tile, panel); });
    }
}

void round_rows(const RoundedRows &rows, int64_t first, int64_t end) { integer_avx512_vnni.round_rows(rows, first, end); }

void piece(const IntegerPiece &p, void *scratch) {
    const Weight &w = *p.weight;
    const int64_t rows = p.row_end - p.row, run = w.run * w.block_k;
    if (rows < kRows || run % 32 || (w.format == Format::INT8 && w.zero != 128)) return integer_avx512_vnni.piece(p, scratch);
    auto *panel = static_cast<int8_t *>(scratch);
    IntegerPiece groups = p, rest = p;
    groups.row_end = rest.row = p.row + rows_of_groups(rows);
    run % 64 ? all_rows<32>(groups, panel) : all_rows<64>(groups, panel);
    if (rest.row < rest.row_end) integer_avx512_vnni.piece(rest, scratch);
}

}  // namespace

constinit const IntegerFunctions integer_amx = {round_rows, piece, kRows, kMostRows, panel_bytes, false, 1};

}  // namespace qforge
