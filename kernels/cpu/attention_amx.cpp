// Attention of many rows over a cache in int8 by AMX (compiled with its flags; called only where CPUID and the system have it): what layers.inl does, bit for bit, since its products are exact.
// Queries and the weights of values are integers of 16 bits: 256 * high byte (signed) + low byte (unsigned), each of which one instruction multiplies with 64 x 16 bytes of keys or values.
#include <algorithm>
#include <type_traits>

#include "amx_config.inl"
#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_512.inl"

#include "attention.inl"

constexpr int64_t kGroup = 16, kDepth = 64;         // rows of a tile; dimensions, or positions, that one instruction adds up
constexpr int64_t kPanel = kDepth * 16;             // bytes
constexpr TileConfig kConfig{.columns = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

inline int64_t whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Integers of 16 bits as bytes
struct Bytes {
    int8_t *high;
    uint8_t *low;

    // What numbers [count], a multiple of 16, become, and zeros up to a multiple of 64; returns their unit
    float put(int64_t at, const float *x, int64_t count) const {
        const Unit unit = unit_of(x, count, 32767.0f);
        const __m512 factor = _mm512_set1_ps(unit.inverse);
        for (int64_t i = 0; i < whole(count, kDepth); i += 16) {
            const __m512i code = i < count ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor)) : _mm512_setzero_si512();
            _mm_storeu_si128(reinterpret_cast<__m128i *>(high + at + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(code, 8)));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(low + at + i), _mm512_cvtepi32_epi8(code));
        }
        return unit.unit;
    }
};

// Two rows of 16 pairs -> 16 times four side by side
inline __m512i fours(__m512i pairs) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), pairs);
}

// 16 sums of products with high and low bytes -> with integers
inline Lanes join(const int32_t *high, const int32_t *low) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low)))};
}

// What a group of 16 rows works in
struct Room {
    int64_t stride;              // of scores and weights: positions, a multiple of 64
    float *scores;               // [16][stride]
    Bytes queries, weights;      // [16][head_dim], [16][stride]
    int8_t *panel;               // [head_dim / 64 or 2][64 / 4][16][4]
    int32_t (*sums)[2][16][16];  // [2] of high and low bytes

    static int64_t bytes(int64_t head_dim, int64_t positions) {
        const int64_t stride = whole(positions, kDepth);
        return kGroup * (stride * static_cast<int64_t>(sizeof(float)) + 2 * (head_dim + stride)) + std::max<int64_t>(2, head_dim / kDepth) * kPanel + 2 * static_cast<int64_t>(sizeof(int32_t[2][16][16]));
    }
    Room(float *scratch, int64_t head_dim, int64_t positions) : stride(whole(positions, kDepth)) {
        auto *next = reinterpret_cast<char *>(scratch);
        const auto take = [&](int64_t bytes) {
            char *taken = next;
            next += bytes;
            return taken;
        };
        scores = reinterpret_cast<float *>(take(kGroup * stride * static_cast<int64_t>(sizeof(float))));
        sums = reinterpret_cast<int32_t(*)[2][16][16]>(take(2 * static_cast<int64_t>(sizeof(int32_t[2][16][16]))));
        queries = {reinterpret_cast<int8_t *>(take(kGroup * head_dim)), reinterpret_cast<uint8_t *>(take(kGroup * head_dim))};
        weights = {reinterpret_cast<int8_t *>(take(kGroup * stride)), reinterpret_cast<uint8_t *>(take(kGroup * stride))};
        panel = reinterpret_cast<int8_t *>(take(std::max<int64_t>(2, head_dim / kDepth) * kPanel));
    }
};

// Scores of `rows` rows and the 16 keys from k on, of which the products with both bytes are in `sums`
inline void scores_of(const Attention &a, const Rows<int8_t> &at, const int32_t (&sums)[2][16][16], int64_t rows, const float *units, const int64_t *position, int64_t k, float *scores,
                      int64_t stride) {
    Lanes scale = Lanes::set(a.scale * a.cache.key_scale);
    if (a.cache.scaled) scale = Lanes::mul(scale, Lanes::load(at.key_scales));
    for (int64_t r = 0; r < rows; ++r) {
        float *s = scores + r * stride + k;
        Lanes::mul(Lanes::mul(join(sums[0][r], sums[1][r]), Lanes::set(units[r])), scale).store(s);
        hide(a, position[r], k, s, -__builtin_inff());
    }
}

void score_group(const Attention &a, const AttentionPiece &p, const Room &room, int64_t rows, const float *units, const int64_t *position, int64_t last) {
    const int64_t d = a.cache.head_dim;
    const auto multiply = [&](const Rows<int8_t> &at, int32_t (&sums)[2][16][16]) {
        for (int64_t i = 0; i < d; i += 4) _mm512_store_si512(room.panel + i * 16, fours(_mm512_loadu_si512(at.keys + i * 16)));
        written_for_tiles();
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t i = 0; i < d; i += kDepth) {
            _tile_loadd(4, room.panel + i * 16, 64);
            _tile_loadd(2, room.queries.high + i, d);
            _tile_loadd(3, room.queries.low + i, d);
            _tile_dpbssd(0, 2, 4);
            _tile_dpbusd(1, 3, 4);
        }
        _tile_stored(0, sums[0][0], 64);
        _tile_stored(1, sums[1][0], 64);
    };
    Tiles<int8_t> tiles(a, p, 0);
    Rows<int8_t> at = tiles.rows();
    multiply(at, room.sums[0]);
    for (int64_t k = 0; k <= last; k += 16) {
        const Rows<int8_t> now = at;
        if (k < last) {  // the next products are on their way while these become scores
            tiles.next();
            at = tiles.rows();
            multiply(at, room.sums[(k / 16 + 1) % 2]);
        }
        scores_of(a, now, room.sums[k / 16 % 2], rows, units, position, k, room.scores, room.stride);
    }
}

// Values of 64 positions and 16 columns from i on -> panel; what lies after the last tile stays as it is: its weights are 0
inline void gather_values(const Rows<int8_t> *at, int64_t tiles, int64_t wide, int64_t i, int8_t *panel) {
    for (int64_t t = 0; t < tiles; ++t)
        for (int64_t pair = 0; pair < 8; pair += 2, panel += 64) {
            const int8_t *values = at[t].values + (pair * wide + i) * 2;
            const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(values)), second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(values + wide * 2));
            _mm512_store_si512(panel, fours(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)));
        }
}

// out[r] = weights x values, times factor[r], for the 32 columns from i on
void mix_group(const Attention &a, const AttentionPiece &p, const Room &room, int64_t rows, const float *factor, int64_t last, int64_t i, float *const *out) {
    const int64_t wide = a.cache.value_dim();
    Lanes total[2][kGroup];
    for (Lanes(&columns)[kGroup] : total)
        for (Lanes &t : columns) t = Lanes::set(0.0f);
    Tiles<int8_t> tiles(a, p, 0);
    for (int64_t k = 0; k <= last;) {
        const int64_t end = (k / kSpan<int8_t> + 1) * kSpan<int8_t>;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(6);
        _tile_zero(7);
        for (; k <= last && k < end; k += kDepth) {
            Rows<int8_t> at[4];
            const int64_t count = std::min<int64_t>(4, (last - k) / 16 + 1);
            for (int64_t t = 0; t < count; ++t, tiles.next()) at[t] = tiles.rows();
            gather_values(at, count, wide, i, room.panel);
            gather_values(at, count, wide, i + 16, room.panel + kPanel);
            written_for_tiles();
            _tile_loadd(2, room.weights.high + k, room.stride);
            _tile_loadd(3, room.weights.low + k, room.stride);
            _tile_loadd(4, room.panel, 64);
            _tile_loadd(5, room.panel + kPanel, 64);
            _tile_dpbssd(0, 2, 4);
            _tile_dpbusd(1, 3, 4);
            _tile_dpbssd(6, 2, 5);
            _tile_dpbusd(7, 3, 5);
            written_for_tiles();  // and that they read it before it is written again
        }
        _tile_stored(0, room.sums[0][0][0], 64);
        _tile_stored(1, room.sums[0][1][0], 64);
        _tile_stored(6, room.sums[1][0][0], 64);
        _tile_stored(7, room.sums[1][1][0], 64);
        for (int m = 0; m < 2; ++m)
            for (int64_t r = 0; r < rows; ++r) total[m][r] = Lanes::add(total[m][r], join(room.sums[m][0][r], room.sums[m][1][r]));
    }
    for (int m = 0; m < 2; ++m)
        for (int64_t r = 0; r < rows; ++r) Lanes::mul(total[m][r], Lanes::set(factor[r])).store(out[r] + i + 16 * m);
}

// `rows` <= 16 rows: row numbers count positions of the piece, and within each the heads of the group
void attend_group(const Attention &a, const AttentionPiece &p, int64_t row, int64_t rows, float *scratch) {
    const int64_t d = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
    float *out[kGroup], units[kGroup], factor[kGroup];
    int64_t position[kGroup];
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = p.query + (row + r) / group;
        position[r] = a.positions[token];
        out[r] = a.out + (token * a.heads + p.kv_head * group + (row + r) % group) * d;
    }
    const int64_t last = position[rows - 1] / 16 * 16, count = last + 16;
    const Room room(scratch, d, count);
    for (int64_t r = 0; r < rows; ++r) {
        const float *q = a.qkv + (p.query + (row + r) / group) * a.row_stride() + (p.kv_head * group + (row + r) % group) * d;
        units[r] = room.queries.put(r * d, q, d);
    }
    score_group(a, p, room, rows, units, position, last);
    for (int64_t r = 0; r < rows; ++r) factor[r] = soften_row(room.scores + r * room.stride, count);
    if (a.cache.scaled) scale_weights<int8_t>(a, p, rows, position, room.scores, room.stride, 0, last);
    for (int64_t r = 0; r < rows; ++r) {
        factor[r] *= room.weights.put(r * room.stride, room.scores + r * room.stride, count) * a.cache.value_scale;
    }
    for (int64_t i = 0; i < d; i += 32) mix_group(a, p, room, rows, factor, last, i, out);
}

bool fits(const Cache &c) { return c.type == CacheType::I8 && c.head_dim % kDepth == 0; }

// Where a window hides positions, tiles would go over all of them.
bool takes(const Attention &a, const AttentionPiece &p) {
    const int64_t rows = (p.query_end - p.query) * (a.heads / a.cache.kv_heads);
    return fits(a.cache) && rows >= kGroup && (a.window == 0 || a.positions[p.query_end - 1] < a.window);
}

int64_t scratch_bytes(const Attention &a, int64_t longest_context) { return fits(a.cache) ? Room::bytes(a.cache.head_dim, longest_context) : 0; }

void attend(const Attention &a, const AttentionPiece &p, float *scratch) {
    const Configured configured(kConfig);
    const int64_t rows = (p.query_end - p.query) * (a.heads / a.cache.kv_heads);
    for (int64_t row = 0; row < rows; row += kGroup) attend_group(a, p, row, std::min(kGroup, rows - row), scratch);
}

}  // namespace

constinit const TileAttention tile_attention_amx{takes, scratch_bytes, attend};

}  // namespace qforge
