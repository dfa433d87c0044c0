// Attention of many rows over a cache in int8 by AMX (compiled with its flags; called only where CPUID and the system have it): what layers.inl does, bit for bit, since its products are exact.
// One instruction multiplies 16 rows of 64 bytes, of queries or of the weights of values, with 64 x 16 bytes of keys or values.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "amx_config.inl"
#include "qforge/layers.h"

namespace qforge {
namespace {

#include "lanes_512.inl"

#include "attention.inl"

constexpr int64_t kGroup = 16, kDepth = 64;         // rows of a tile; dimensions, or positions, that one instruction adds up
static_assert(kDepth == kSpan);  // weights of one multiplication have one unit
constexpr int64_t kPanel = kDepth * 16;             // bytes
constexpr TileConfig kConfig{.columns = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

inline int64_t whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

inline Lanes numbers(const int32_t *sums) { return {_mm512_cvtepi32_ps(_mm512_load_si512(sums))}; }

using Sums = int32_t[16][16];

// What a group of 16 rows works in
struct Room {
    int64_t stride;       // of scores and weights: positions, a multiple of 64
    float *scores;        // [16][stride]; then weights, a byte each, at the beginning of each row
    float *units;         // [stride / 64][16], of weights
    float *queries;       // [16][head_dim]; then codes, a byte each, at the beginning of each row
    int8_t *panels;       // [head_dim / 64 or 2][64 / 4][16][4]
    Sums *sums;           // [4]

    static int64_t bytes(int64_t head_dim, int64_t positions) {
        const int64_t stride = whole(positions, kDepth), floats = static_cast<int64_t>(sizeof(float));
        return kGroup * (stride * floats + stride / kDepth * floats + head_dim * floats) + std::max<int64_t>(2, head_dim / kDepth) * kPanel + 4 * static_cast<int64_t>(sizeof(Sums));
    }
    Room(float *scratch, int64_t head_dim, int64_t positions) : stride(whole(positions, kDepth)) {
        auto *next = reinterpret_cast<char *>(scratch);
        const auto take = [&](int64_t bytes) {
            char *taken = next;
            next += bytes;
            return taken;
        };
        const int64_t floats = static_cast<int64_t>(sizeof(float));
        scores = reinterpret_cast<float *>(take(kGroup * stride * floats));
        sums = reinterpret_cast<Sums *>(take(4 * static_cast<int64_t>(sizeof(Sums))));
        units = reinterpret_cast<float *>(take(kGroup * stride / kDepth * floats));
        queries = reinterpret_cast<float *>(take(kGroup * head_dim * floats));
        panels = reinterpret_cast<int8_t *>(take(std::max<int64_t>(2, head_dim / kDepth) * kPanel));
    }
};

// Scores of `rows` rows and the 16 keys from k on, of which the products are in `sums`, in units of the rows
inline void scores_of(const Attention &a, const Rows<int8_t> &at, const Sums &sums, int64_t rows, const int64_t *position, int64_t k, float *scores, int64_t stride) {
    const Lanes scale = Lanes::mul(Lanes::set(score_scale(a)), Lanes::load(at.key_scales));
    for (int64_t r = 0; r < rows; ++r) {
        float *s = scores + r * stride + k;
        seen(a, position[r], k, Lanes::mul(numbers(sums[r]), scale), -__builtin_inff()).store(s);
    }
}

void score_group(const Attention &a, const AttentionPiece &p, const Room &room, int64_t rows, const int64_t *position, int64_t last) {
    const int64_t d = a.cache.head_dim;
    const auto multiply = [&](const Rows<int8_t> &at, Sums &sums) {
        for (int64_t i = 0; i < d; i += 4) _mm512_store_si512(room.panels + i * 16, fours(_mm512_loadu_si512(at.keys + i * 16)));
        written_for_tiles();
        _tile_zero(0);
        for (int64_t i = 0; i < d; i += kDepth) {
            _tile_loadd(2, reinterpret_cast<const int8_t *>(room.queries) + i, d * static_cast<int64_t>(sizeof(float)));
            _tile_loadd(4, room.panels + i * 16, 64);
            _tile_dpbssd(0, 2, 4);
        }
        _tile_stored(0, sums[0], 64);
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
        scores_of(a, now, room.sums[k / 16 % 2], rows, position, k, room.scores, room.stride);
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

// out[r] = weights x values, times units and factor[r], for the 32 columns from i on
void mix_group(const Attention &a, const AttentionPiece &p, const Room &room, int64_t rows, const float *factor, int64_t last, int64_t i, float *const *out) {
    const int64_t wide = a.cache.value_dim();
    Lanes total[2][kGroup];
    for (Lanes(&columns)[kGroup] : total)
        for (Lanes &t : columns) t = Lanes::set(0.0f);
    Tiles<int8_t> tiles(a, p, 0);
    const auto multiply = [&](int64_t k) {
        Sums *sums = room.sums + k / kDepth % 2 * 2;
        Rows<int8_t> at[4];
        const int64_t count = std::min<int64_t>(4, (last - k) / 16 + 1);
        for (int64_t t = 0; t < count; ++t, tiles.next()) at[t] = tiles.rows();
        gather_values(at, count, wide, i, room.panels);
        gather_values(at, count, wide, i + 16, room.panels + kPanel);
        written_for_tiles();
        _tile_loadd(2, reinterpret_cast<const uint8_t *>(room.scores) + k, room.stride * static_cast<int64_t>(sizeof(float)));
        for (int m = 0; m < 2; ++m) {
            _tile_zero(0);
            _tile_loadd(4, room.panels + m * kPanel, 64);
            _tile_dpbusd(0, 2, 4);
            _tile_stored(0, sums[m], 64);
        }
        written_for_tiles();  // and that they read it before it is written again
    };
    multiply(0);
    for (int64_t k = 0; k <= last; k += kDepth) {
        if (k + kDepth <= last) multiply(k + kDepth);
        for (int m = 0; m < 2; ++m)
            for (int64_t r = 0; r < rows; ++r)
                total[m][r] = Lanes::fma(numbers(room.sums[k / kDepth % 2 * 2 + m][r]), Lanes::set(room.units[k / kDepth * kGroup + r]), total[m][r]);
    }
    for (int m = 0; m < 2; ++m)
        for (int64_t r = 0; r < rows; ++r) Lanes::mul(total[m][r], Lanes::set(factor[r])).store(out[r] + i + 16 * m);
}

// `rows` <= 16 rows: row numbers count positions of the piece, and within each the heads of the group
void attend_group(const Attention &a, const AttentionPiece &p, int64_t row, int64_t rows, float *scratch) {
    const int64_t d = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
    float *out[kGroup], unit[kGroup], factor[kGroup];
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
        std::copy_n(q, d, room.queries + r * d);
    }
    query_codes<1, kGroup>(room.queries, rows, d, [](const Lanes &x, void *to) { Lanes::to_bytes(x, to); }, unit);
    score_group(a, p, room, rows, position, last);
    const auto codes = [&](int64_t r, int64_t k) { return reinterpret_cast<char *>(room.scores + r * room.stride) + k; };
    soften_codes<kGroup>(a, p, rows, position, unit, 0, last, room.scores, room.stride, room.units, factor, [&](const float *span, const float *inverse, int64_t k, int64_t tiles) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < tiles; ++i) Lanes::to_bytes(Lanes::mul(Lanes::load(span + r * room.stride + i * 16), Lanes::set(inverse[r])), codes(r, k + i * 16));
    });
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = count; k < room.stride; k += 16) Lanes::to_bytes(Lanes::set(0.0f), codes(r, k));
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
