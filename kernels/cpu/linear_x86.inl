// The linear over packed weights, once for the instruction sets of x86. Order of sums: linear.h. The file that includes this gives
//   Columns: 16 columns of one input, or 16 partial sums; Columns::Input: one input of a row, as often as a product needs it
//   Key, load_key<F>(weight, tile, block): what codes of a block are read against; unpack<F, J>(chunk, key): what input J of a chunk stands for before it is scaled, exact in fp32
//   kPanelRows x kPanelTiles: sums that registers hold where weights are in panels; kFewTiles[rows - 1]: tiles at once where they are unpacked in registers
#include <algorithm>
#include <utility>

#include "qforge/linear.h"

namespace qforge {
namespace {

// Bytes of codes that are brought before few rows read them: of these tiles, then of those after them. Several streams at once are more than a CPU follows by itself (2048 and 4096 inputs, a Xeon: 1 row 16.5 -> 19.5 GB/s,
// with AVX2 9 -> 16; 2 to 8 rows 1.25 to 3 times as fast; panels gain nothing).
constexpr int64_t kNear = 2048;

inline __attribute__((always_inline)) void add_block(Columns &total, const Columns &part, const float *scale) {
    if (scale) total.add_product(Columns::load(scale), part);
    else total.add(part);
}

inline const float *scales_of(const Weight &w, int64_t tile, int64_t block) { return w.scales ? w.scales + (tile * w.blocks + block) * kTile : nullptr; }

inline void store(const Weight &w, int64_t tile, Columns total, float *y) {
    const int64_t column = tile * kTile;
    if (column + kTile <= w.columns) {
        if (w.bias) total.add(Columns::load(w.bias + column));
        return total.store(y + column);
    }
    float last[kTile];
    total.store(last);
    for (int64_t c = column; c < w.columns; ++c) y[c] = w.bias ? last[c - column] + w.bias[c] : last[c - column];
}

// Calls run(std::integral_constant<int, J>) for the inputs J of a chunk
template <typename Run, int... J>
inline __attribute__((always_inline)) void each_of(std::integer_sequence<int, J...>, const Run &run) {
    (run(std::integral_constant<int, J>{}), ...);
}
template <typename Run>
inline __attribute__((always_inline)) void each_input(const Run &run) { each_of(std::make_integer_sequence<int, 8>{}, run); }

// R rows x T tiles, weights unpacked in registers
template <Format F, int R, int T>
void few_rows(const Piece &p, int64_t row, int64_t tile) {
    const Weight &w = *p.weight;
    const int64_t chunks = w.block_k / 8, bytes = tile_bytes(w);
    const float *x[R];
    for (int r = 0; r < R; ++r) x[r] = p.x + (row + r) * p.x_stride;
    const uint8_t *chunk[T];
    for (int t = 0; t < T; ++t) chunk[t] = chunks_of(w, tile + t);
    const int64_t far = w.inputs() - kNear * 8 / chunk_bytes(F);  // from here on what is near is past these tiles' end
    Columns total[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) total[r][t] = Columns::zero();
    for (int64_t b = 0, k = 0; b < w.blocks; ++b) {
        Columns part[R][T];
        Key keys[T];
        for (int t = 0; t < T; ++t) {
            keys[t] = load_key<F>(w, tile + t, b);
            for (int r = 0; r < R; ++r) part[r][t] = Columns::zero();
        }
        for (int64_t c = 0; c < chunks; ++c, k += 8) {
            if constexpr (chunk_bytes(F) <= 128)
                for (int t = 0; t < T; ++t)
                    for (int i = 0; i < chunk_bytes(F); i += 64) __builtin_prefetch(chunk[t] + kNear + (k < far ? 0 : (T - 1) * bytes) + i, 0, 2);
            each_input([&](auto j) __attribute__((always_inline)) {
                Columns values[T];
                for (int t = 0; t < T; ++t) values[t] = unpack<F, j.value>(chunk[t], keys[t]);
                for (int r = 0; r < R; ++r) {
                    const Columns::Input input = Columns::input(x[r] + k + j.value);
                    for (int t = 0; t < T; ++t) part[r][t].add_product(input, values[t]);
                }
            });
            for (int t = 0; t < T; ++t) chunk[t] += chunk_bytes(F);
        }
        for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r) add_block(total[r][t], part[r][t], scales_of(w, tile + t, b));
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(w, tile + t, total[r][t], p.y + (row + r) * p.y_stride);
}

template <Format F, int R>
void rows_of(const Piece &p) {
    constexpr int T = kFewTiles[R - 1];
    int64_t tile = p.tile;
    for (; tile + T <= p.tile_end; tile += T) few_rows<F, R, T>(p, p.row, tile);
    if constexpr (T > 2)
        for (; tile + 2 <= p.tile_end; tile += 2) few_rows<F, R, 2>(p, p.row, tile);  // tasks of narrow weights
    for (; tile < p.tile_end; ++tile) few_rows<F, R, 1>(p, p.row, tile);
}

template <Format F>
void unpack_block(const Weight &w, int64_t tile, int64_t block, float *panel) {
    const int64_t chunks = w.block_k / 8;
    const uint8_t *chunk = w.codes + (tile * w.blocks + block) * chunks * chunk_bytes(F);
    const Key key = load_key<F>(w, tile, block);
    for (int64_t c = 0; c < chunks; ++c, chunk += chunk_bytes(F), panel += 8 * kTile)
        each_input([&](auto j) __attribute__((always_inline)) { unpack<F, j.value>(chunk, key).store(panel + j.value * kTile); });
}

// Tiles of a strip: a block's weights as panels [block_k][kTile], their scales (null: none), and totals [rows][kWideTiles * kTile]
struct Panels {
    const float *panel[kWideTiles], *scale[kWideTiles];
    float *totals;
};

// totals of R rows x T tiles += one block
template <int R, int T>
void multiply_panels(const float *x, int64_t x_stride, int64_t block_k, const Panels &at, int64_t row, int64_t tile) {
    Columns part[R][T];
    const float *panel[T];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) part[r][t] = Columns::zero();
    for (int t = 0; t < T; ++t) panel[t] = at.panel[tile + t];
    for (int64_t k = 0; k < block_k; ++k) {
        Columns values[T];
        for (int t = 0; t < T; ++t) values[t] = Columns::load(panel[t] + k * kTile);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const Columns::Input input = Columns::input(x + r * x_stride + k);
            for (int t = 0; t < T; ++t) part[r][t].add_product(input, values[t]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) {
            float *to = at.totals + ((row + r) * kWideTiles + tile + t) * kTile;
            Columns total = Columns::load(to);
            add_block(total, part[r][t], at.scale[tile + t]);
            total.store(to);
        }
}

// The same for up to R rows
template <int R, int T>
void some_rows(int64_t rows, const float *x, int64_t x_stride, int64_t block_k, const Panels &at, int64_t row, int64_t tile) {
    if constexpr (R > 1)
        if (rows < R) return some_rows<R - 1, T>(rows, x, x_stride, block_k, at, row, tile);
    multiply_panels<R, T>(x, x_stride, block_k, at, row, tile);
}

template <Format F>
void many_rows(const Piece &p, float *scratch) {
    const Weight &w = *p.weight;
    const int64_t tiles = p.tile_end - p.tile, rows = p.row_end - p.row;
    Panels at{};
    at.totals = scratch;
    float *panels = scratch + kRowChunk * kWideTiles * kTile;
    std::fill_n(at.totals, rows * kWideTiles * kTile, 0.0f);
    for (int64_t b = 0; b < w.blocks; ++b) {
        for (int64_t t = 0; t < tiles; ++t) {
            at.scale[t] = scales_of(w, p.tile + t, b);
            if constexpr (F == Format::F32) {
                at.panel[t] = reinterpret_cast<const float *>(w.codes) + ((p.tile + t) * w.blocks + b) * w.block_k * kTile;
            } else {
                at.panel[t] = panels + t * w.block_k * kTile;
                unpack_block<F>(w, p.tile + t, b, panels + t * w.block_k * kTile);
            }
        }
        for (int64_t r = 0; r < rows; r += kPanelRows) {
            const float *x = p.x + (p.row + r) * p.x_stride + b * w.block_k;
            int64_t t = 0;
            for (; t + kPanelTiles <= tiles; t += kPanelTiles) some_rows<kPanelRows, kPanelTiles>(rows - r, x, p.x_stride, w.block_k, at, r, t);
            if constexpr (kPanelTiles > 1)
                for (; t < tiles; ++t) some_rows<kPanelRows, 1>(rows - r, x, p.x_stride, w.block_k, at, r, t);
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t t = 0; t < tiles; ++t) store(w, p.tile + t, Columns::load(at.totals + (r * kWideTiles + t) * kTile), p.y + (p.row + r) * p.y_stride);
}

template <Format F>
void any_rows(const Piece &p, float *scratch) {
    switch (p.row_end - p.row) {
        case 1: return rows_of<F, 1>(p);
        case 2: return rows_of<F, 2>(p);
        case 3: return rows_of<F, 3>(p);
        case 4: return rows_of<F, 4>(p);
        default: return many_rows<F>(p, scratch);
    }
}
static_assert(kFewRows == 4);

void any_format(const Piece &p, float *scratch) {
    switch (p.weight->format) {
        case Format::INT4: return any_rows<Format::INT4>(p, scratch);
        case Format::INT8: return any_rows<Format::INT8>(p, scratch);
        case Format::F32: return any_rows<Format::F32>(p, scratch);
        case Format::F16: return any_rows<Format::F16>(p, scratch);
        case Format::BF16: return any_rows<Format::BF16>(p, scratch);
        case Format::BOOK4: return any_rows<Format::BOOK4>(p, scratch);
        case Format::E4M3: return any_rows<Format::E4M3>(p, scratch);
    }
}

}  // namespace
}  // namespace qforge
