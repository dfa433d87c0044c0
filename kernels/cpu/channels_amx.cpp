// Weights of 8 bits with a scale a column times 16-bit activations with a scale a row for AMX (channels.h; compiled with its flags; called only where CPUID and the system have it).
// Weights are bytes around 128: INT8 as it is packed, INT4 as it is made, for few rows in registers, for more in panels that lie like INT8. Sums have 128 times the row's sum too much.
// Few rows go through AVX-512's VNNI. Bits are equal.
#include <limits>
#include <type_traits>

#include "amx.inl"
#include "qforge/channels.h"

namespace qforge {
namespace {

constexpr int64_t kAhead = 4096;     // bytes of weights that are brought before they are read: few rows read faster than the CPU looks ahead
constexpr int kRowsInRegisters = 4;  // so many are faster without tiles

// Sums of (high, low) x two tiles of columns; weights of two tiles; high bytes, low bytes
constexpr TileConfig kConfig{.columns = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

void round_rows(const Weight &w, const float *x, int64_t x_stride, const RoundedChannels &out, int64_t row, int64_t row_end) {
    constexpr uint32_t kInfinity = 0x7F800000;  // NaNs' bits are larger
    constexpr float most = 32512;
    const int64_t inputs = w.inputs(), count = stretches(w);
    for (int64_t r = row; r < row_end; ++r) {
        const float *values = x + r * x_stride;
        const uint32_t bits = largest_bits(values, inputs);
        const float m = __builtin_bit_cast(float, bits);
        const bool finite = bits < kInfinity, has_codes = finite && m >= 0x1p-100f;
        out.scales[r] = has_codes ? m / most : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        const __m512 by = _mm512_set1_ps(has_codes ? most / m : 0.0f);
        __m512i sum = _mm512_setzero_si512(), high_sum = sum;
        int8_t *to = out.at(r, count);
        for (int64_t i = 0; i < count * kStretch; i += kLanes) {
            const __mmask16 here = i >= inputs || !has_codes ? 0 : lanes(inputs - i);
            const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(here, values + i), by)), high = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            int8_t *at = to + i / kStretch * kStretchBytes + i % kStretch;
            store_bytes(at, high, kLanes);
            store_bytes(at + kTileBytes, _mm512_sub_epi32(code, _mm512_slli_epi32(high, 8)), kLanes);
            sum = _mm512_add_epi32(sum, code);
            high_sum = _mm512_add_epi32(high_sum, high);
        }
        const int32_t all = _mm512_reduce_add_epi32(sum), highs = _mm512_reduce_add_epi32(high_sum);
        out.sums[2 * r] = -128 * highs;
        out.sums[2 * r + 1] = -128 * (all - 256 * highs);
    }
}

const uint8_t *codes_of(const Weight &w, int64_t tile) { return w.codes + tile * w.inputs() / 8 * chunk_bytes(w.format); }

void store(const ChannelsPiece &p, int64_t row, int64_t tile, __m512i high, __m512i low) {
    const Weight &w = *p.weight;
    const int64_t column = tile * kTile;
    const __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(256), _mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
    const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(column_scales(w, tile)), _mm512_mul_ps(_mm512_set1_ps(p.rounded.scales[row]), sum));
    V::store(p.y + row * p.y_stride + column, y, w.bias ? w.bias + column : nullptr, w.columns - column);
}

// ---- a chunk's weights: 8 inputs x 16 columns ----

struct Halves {
    __m512i low, high;  // inputs 0 to 3, 4 to 7
};

// INT4: the high byte of code * step + first
class Steps {
  public:
    Steps(const Weight &w, int64_t tile, int64_t block) {
        const int64_t at = (tile * w.blocks + block) * kTile;
        const __m512i step = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w.channels->steps.data() + at)));
        const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.zeros + at)));
        step_ = _mm512_or_si512(step, _mm512_slli_epi32(step, 16));
        first_ = _mm512_sub_epi16(_mm512_set1_epi16(static_cast<short>(128 * 256 + 128)), _mm512_mullo_epi16(_mm512_or_si512(zero, _mm512_slli_epi32(zero, 16)), step_));
    }
    Halves weights(const uint8_t *chunk) const {
        const __m512i both = _mm512_loadu_si512(chunk), code = _mm512_set1_epi16(15);
        return {join(_mm512_and_si512(both, code), _mm512_and_si512(_mm512_maskz_shuffle_epi8(kEven, both, upper_byte()), code)),
                join(_mm512_and_si512(_mm512_srli_epi16(both, 4), code), _mm512_srli_epi16(both, 12))};
    }

  private:
    static constexpr __mmask64 kEven = 0x5555555555555555;
    // Where shifts would do as well: they and multiplications have but one port
    static __m512i upper_byte() { return _mm512_set4_epi32(0x0F0F0D0D, 0x0B0B0909, 0x07070505, 0x03030101); }
    __m512i sum(__m512i code) const { return _mm512_add_epi16(_mm512_mullo_epi16(code, step_), first_); }
    __m512i join(__m512i even, __m512i odd) const { return _mm512_mask_shuffle_epi8(sum(odd), kEven, sum(even), upper_byte()); }

    __m512i step_, first_;
};

// INT8: as it is packed
struct Bytes {
    Bytes(const Weight &, int64_t, int64_t) {}
    Halves weights(const uint8_t *chunk) const { return {_mm512_loadu_si512(chunk), _mm512_loadu_si512(chunk + 64)}; }
};

// ---- few rows ----

// R rows x 1 tile
template <Format F, int R>
void in_registers(const ChannelsPiece &p, int64_t tile) {
    const Weight &w = *p.weight;
    const uint8_t *chunk = codes_of(w, tile);
    const int8_t *x[R];
    __m512i sum[R][2][2];  // [row][high, low][half of a chunk]
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        x[r] = p.rounded.at(p.row + r, stretches(w));
#pragma GCC unroll 2
        for (int l = 0; l < 2; ++l) {
            sum[r][l][0] = _mm512_set1_epi32(p.rounded.sums[2 * (p.row + r) + l]);
            sum[r][l][1] = _mm512_setzero_si512();
        }
    }
    uint64_t input = 0;
    for (int64_t b = 0; b < w.blocks; ++b) {
        const std::conditional_t<F == Format::INT4, Steps, Bytes> block(w, tile, b);
        for (const uint64_t end = input + static_cast<uint64_t>(w.block_k); input < end; input += 8, chunk += chunk_bytes(F)) {
            for (int64_t line = 0; line < chunk_bytes(F); line += 64) __builtin_prefetch(chunk + kAhead + line, 0, 3);
            const Halves four = block.weights(chunk);
            const uint64_t at = input / kStretch * kStretchBytes + input % kStretch;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (uint64_t l = 0; l < 2; ++l) {
                    sum[r][l][0] = _mm512_dpbusd_epi32(sum[r][l][0], four.low, V::broadcast(x[r] + at + l * kTileBytes));
                    sum[r][l][1] = _mm512_dpbusd_epi32(sum[r][l][1], four.high, V::broadcast(x[r] + at + l * kTileBytes + 4));
                }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(p, p.row + r, tile, _mm512_add_epi32(sum[r][0][0], sum[r][0][1]), _mm512_add_epi32(sum[r][1][0], sum[r][1][1]));
}

template <Format F, int R = kRowsInRegisters>
void few_rows(const ChannelsPiece &p) {
    if constexpr (R > 1)
        if (p.row_end - p.row < R) return few_rows<F, R - 1>(p);
    for (int64_t tile = p.tile; tile < p.tile_end; ++tile) in_registers<F, R>(p, tile);
}

// ---- groups of 16 rows ----

// Makes weights of INT4 tiles, one tile after the other, into panels that lie like INT8, as far as it is asked to at a time
class Unpacker {
  public:
    Unpacker(const Weight &weight, int64_t tile, int64_t tile_end, uint8_t *panels) : w_(weight), tile_(tile), tile_end_(tile_end), chunk_(codes_of(weight, tile)), to_(panels) {}

    void advance(int64_t chunks) {
        while (chunks > 0 && tile_ < tile_end_) {
            const Steps block(w_, tile_, block_);
            const int64_t here = std::min(chunks, w_.block_k / 8 - done_);
            for (int64_t i = 0; i < here; ++i, chunk_ += 64, to_ += 128) {
                __builtin_prefetch(chunk_ + kAhead, 0, 3);
                const Halves four = block.weights(chunk_);
                _mm512_store_si512(to_, four.low);
                _mm512_store_si512(to_ + 64, four.high);
            }
            chunks -= here;
            done_ += here;
            if (done_ < w_.block_k / 8) return;
            done_ = 0;
            if (++block_ < w_.blocks) continue;
            block_ = 0;
            ++tile_;
        }
    }
    void finish() { advance((tile_end_ - tile_) * w_.inputs() / 8); }

  private:
    const Weight &w_;
    int64_t tile_, tile_end_, block_ = 0, done_ = 0;  // done: chunks of the block
    const uint8_t *chunk_;
    uint8_t *to_;
};

// Up to 16 rows x T tiles with `codes`, 8-bit weights; `meanwhile` is called once for each stretch of inputs
template <int T, typename F>
void in_tiles(const ChannelsPiece &p, int64_t row, int64_t rows, int64_t tile, const uint8_t *codes, const F &meanwhile) {
    const Weight &w = *p.weight;
    const int64_t whole = w.inputs() / kStretch, rest = w.inputs() % kStretch, tile_bytes = w.inputs() * kTile;
    const int8_t *x = p.rounded.at(row, stretches(w));
    float *y = p.y + row * p.y_stride + tile * kTile;
    int64_t here = 0;  // rows of y that are being brought
    alignas(64) int32_t sums[2][T][kRows][kTile];
    alignas(64) uint8_t last[2][kTileBytes];  // weights of the last inputs: what lies after them may not be read
    const auto multiply = [&](const uint8_t *first, const uint8_t *second) {
        _tile_loadd(4, first, 64);
        if constexpr (T == 2) _tile_loadd(5, second, 64);
        _tile_loadd(6, x, 64);
        _tile_dpbsud(0, 6, 4);
        if constexpr (T == 2) _tile_dpbsud(1, 6, 5);
        _tile_loadd(7, x + kTileBytes, 64);
        _tile_dpbsud(2, 7, 4);
        if constexpr (T == 2) _tile_dpbsud(3, 7, 5);
        x += kStretchBytes;
        meanwhile();
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < whole; ++k, codes += kTileBytes) {
        for (const int64_t end = std::min(rows, 2 * (k + 1) * rows / whole); here < end; ++here)  // sums would wait behind stores to memory that is not there yet
            for (int t = 0; t < T; ++t) __builtin_prefetch(y + here * p.y_stride + t * kTile, 1);
        multiply(codes, codes + tile_bytes);
    }
    if (rest) {
        for (int t = 0; t < T; ++t) std::copy_n(codes + t * tile_bytes, rest * kTile, last[t]);
        for (int t = 0; t < T; ++t) std::fill(last[t] + rest * kTile, last[t] + kTileBytes, uint8_t{0});
        written_for_tiles();
        multiply(last[0], last[1]);
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(2, sums[1][0], 64);
    if constexpr (T == 2) {
        _tile_stored(1, sums[0][1], 64);
        _tile_stored(3, sums[1][1], 64);
    }
    written_for_tiles();
    for (int64_t r = 0; r < rows; ++r) {
        const __m512i high = _mm512_set1_epi32(p.rounded.sums[2 * (row + r)]), low = _mm512_set1_epi32(p.rounded.sums[2 * (row + r) + 1]);
        for (int t = 0; t < T; ++t) store(p, row + r, tile + t, _mm512_add_epi32(high, _mm512_load_si512(sums[0][t][r])), _mm512_add_epi32(low, _mm512_load_si512(sums[1][t][r])));
    }
}

// All rows x two tiles, or the last one
template <typename F>
void in_groups(const ChannelsPiece &p, int64_t tile, const uint8_t *codes, const F &meanwhile) {
    for_groups(p.row, p.row_end, [&](int64_t row, int64_t rows) {
        if (tile + 2 <= p.tile_end) in_tiles<2>(p, row, rows, tile, codes, meanwhile);
        else in_tiles<1>(p, row, rows, tile, codes, meanwhile);
    });
}

// Two tiles are unpacked while the first rows pass over the two before them.
void unpacked(const ChannelsPiece &p, uint8_t *panels) {
    const Weight &w = *p.weight;
    const int64_t pair_bytes = 2 * w.inputs() * kTile;
    Unpacker(w, p.tile, std::min(p.tile + 2, p.tile_end), panels).finish();
    for (int64_t tile = p.tile, pair = 0; tile < p.tile_end; tile += 2, pair ^= 1) {
        Unpacker next(w, std::min(tile + 2, p.tile_end), std::min(tile + 4, p.tile_end), panels + (pair ^ 1) * pair_bytes);
        in_groups(p, tile, panels + pair * pair_bytes, [&] { next.advance(2 * kStretch / 8); });
    }
}

void as_packed(const ChannelsPiece &p) {
    const Weight &w = *p.weight;
    const int64_t pair_bytes = 2 * w.inputs() * kTile, calls = (p.row_end - p.row + kRows - 1) / kRows * stretches(w), step = (pair_bytes / calls + 63) / 64 * 64;
    for (int64_t tile = p.tile; tile < p.tile_end; tile += 2) {
        const uint8_t *next = codes_of(w, std::min(tile + 2, p.tile_end)), *end = codes_of(w, std::min(tile + 4, p.tile_end));
        in_groups(p, tile, codes_of(w, tile), [&] {
            for (const uint8_t *to = std::min(next + step, end); next < to; next += 64) __builtin_prefetch(next, 0, 2);
        });
    }
}

void piece(const ChannelsPiece &p, void *scratch) {
    const bool packed = p.weight->format == Format::INT4;
    if (p.row_end - p.row <= kRowsInRegisters) return packed ? few_rows<Format::INT4>(p) : few_rows<Format::INT8>(p);
    const Configured tiles(kConfig);
    packed ? unpacked(p, static_cast<uint8_t *>(scratch)) : as_packed(p);
}

}  // namespace

constinit const ChannelsFunctions channels_amx = {round_rows, piece};

}  // namespace qforge
