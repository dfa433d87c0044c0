// Products of bf16 for AMX (bf16.h; compiled with its flags; called only where CPUID and the system have it). Weights become bf16 two tiles of columns at a time, while the first rows pass over
// them; panels of two tiles are read again by the rows after these.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "amx_config.inl"
#include "bf16_512.inl"

namespace qforge {
namespace {

#include "lanes_512.inl"

#include "activation.inl"

constexpr int64_t kLead = 2;      // stretches that weights are made before they are multiplied
constexpr int64_t kNear = 12;     // stretches that codes are brought before they are read: a pair of tiles ahead, which may be 90 KiB, 2048 x 5632 takes 4 (32 rows) to 10 % (1 row) longer
constexpr int64_t kRing = 4;      // stretches of a panel that rows pass but once: a whole one would drive activations out of the L1 cache

// Sums of two groups of rows x two tiles of columns; weights of two tiles; activations of two groups. `rows` of a group.
TileConfig config(int64_t rows) {
    TileConfig made{.columns = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    for (const int tile : {0, 1, 2, 3, 6, 7}) made.rows[tile] = static_cast<uint8_t>(rows);
    return made;
}

void round_rows(const Weight &w, const float *x, int64_t x_stride, const Bf16Rows &to, int64_t row, int64_t row_end, int64_t begin, int64_t end) {
    const int64_t inputs = w.inputs(), count = stretches(w);
    for (int64_t r = row; r < row_end; ++r) {
        const float *from = x + r * x_stride;
        uint16_t *at = to.at(r, count) + begin * kTileValues;
        for (int64_t i = begin * kStretch; i < end * kStretch; i += kStretch, at += kTileValues) {
            const uint32_t here = inputs - i >= kStretch ? 0xFFFFFFFF : (1u << (inputs - i)) - 1;
            const __m512 first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(here), from + i), second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(here >> 16), from + i + 16);
            const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
            _mm512_store_si512(at, reinterpret_cast<const __m512i &>(both));
        }
    }
}

template <int M, int N>
inline void clear_sums() {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
}

template <int M, int N>
void store_sums(float *y, int64_t stride, int64_t group) {
    _tile_stored(0, y, stride * 4);
    if constexpr (N == 2) _tile_stored(1, y + kTile, stride * 4);
    if constexpr (M == 2) _tile_stored(2, y + group * stride, stride * 4);
    if constexpr (M == 2 && N == 2) _tile_stored(3, y + group * stride + kTile, stride * 4);
}

struct Stretch {
    const uint8_t *w, *second;  // weights of two tiles
    const uint16_t *x, *next;  // activations of two groups
};

// The products of a stretch in four parts, between which there is other work: what is loaded is needed a part later.
template <int M, int N>
inline void part(int i, const Stretch &s) {
    if (i == 0) {
        _tile_loadd(4, s.w, 64);
        _tile_loadd(6, s.x, 64);
    } else if (i == 1) {
        if constexpr (N == 2) _tile_loadd(5, s.second, 64);
        _tile_dpbf16ps(0, 6, 4);
    } else if (i == 2) {
        if constexpr (M == 2) _tile_loadd(7, s.next, 64);
        if constexpr (N == 2) _tile_dpbf16ps(1, 6, 5);
    } else if constexpr (M == 2) {
        _tile_dpbf16ps(2, 7, 4);
        if constexpr (N == 2) _tile_dpbf16ps(3, 7, 5);
    }
}

// M groups of rows x N tiles whose panels are there, and between(part, of parts) meanwhile. Activations are not kept in the L1 cache: panels are read again.
template <int M, int N, typename Between>
void multiply(const uint16_t *x, const uint8_t *panels, int64_t count, const Between &between) {
    const uint16_t *next = x + count * kTileValues;
    const uint8_t *second = panels + count * kPanelBytes;
    clear_sums<M, N>();
    for (int64_t s = 0; s < count; ++s) {
        _tile_loadd(4, panels + s * kPanelBytes, 64);
        _tile_stream_loadd(6, x + s * kTileValues, 64);
        _tile_dpbf16ps(0, 6, 4);
        if constexpr (N == 2) {
            _tile_loadd(5, second + s * kPanelBytes, 64);
            _tile_dpbf16ps(1, 6, 5);
        }
        if constexpr (M == 2) {
            _tile_stream_loadd(7, next + s * kTileValues, 64);
            _tile_dpbf16ps(2, 7, 4);
            if constexpr (N == 2) _tile_dpbf16ps(3, 7, 5);
        }
        between(s + 1, count);
    }
}

// Tiles of columns that are computed together: so far apart; and how far it is to the next ones
struct Tiles {
    int64_t first, apart, step;

    int64_t tile(int64_t n) const { return first + n * apart; }
};

// The same while the panels are made, kLead stretches ahead. `last`: the number of stretches that a panel holds, a power of two, less 1; -1: all.
template <Format F, int M, int N>
void make_and_multiply(const Weight &w, const Tiles &at, const uint16_t *x, uint8_t *panels, int64_t last) {
    constexpr int64_t kBytes = chunk_bytes(F), kMade = kPanelBytes / 4;  // of a chunk's codes and weights
    const int64_t count = stretches(w), tile_bytes = w.inputs() / 8 * kBytes, tile_scales = w.blocks * kTile, of_block = w.block_k / kStretch, near = std::min(kNear, count);
    const Codes<F> codes(w);
    const auto line = [&](int64_t n, int64_t block) { return Line<F>(w, at.tile(n) * tile_scales + block * kTile, at.step * tile_scales); };
    const auto ready = [&](int64_t s) {
        const uint8_t *panel = panels + (s & last) * kPanelBytes;
        const uint16_t *rows = x + s * kTileValues;
        return Stretch{panel, panel + count * kPanelBytes, rows, rows + count * kTileValues};
    };
    Line<F> first = line(0, 0), second = line(N - 1, 0);
    const uint8_t *from = w.codes + at.first * tile_bytes;
    int64_t left = of_block, block = 0;
    const auto stretch = [&](int64_t s, auto multiplied) {
        if (left == 0) {
            left = of_block;
            first = line(0, ++block);
            if constexpr (N == 2) second = line(1, block);
        }
        --left;
        const int64_t ahead = near * 4 * kBytes + (s < count - near ? 0 : (at.step - 1) * tile_bytes);  // past a tile's end: in the tile that is next where this one is now
        uint8_t *to = panels + (s & last) * kPanelBytes;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if constexpr (multiplied.value) part<M, N>(i, ready(s - kLead));
#pragma GCC unroll 2
            for (int j = N * i; j < N * (i + 1); ++j) {  // chunks of both tiles
                const bool other = j >= 4;
                codes.chunk(from + other * at.apart * tile_bytes + j % 4 * kBytes, other ? second : first, to + other * count * kPanelBytes + j % 4 * kMade, ahead);
            }
        }
        from += 4 * kBytes;
        written_for_tiles();
    };
    clear_sums<M, N>();
    for (int64_t s = 0; s < std::min(kLead, count); ++s) stretch(s, std::false_type{});
    for (int64_t s = kLead; s < count; ++s) stretch(s, std::true_type{});
    for (int64_t s = std::max<int64_t>(0, count - kLead); s < count; ++s)
        for (int i = 0; i < 4; ++i) part<M, N>(i, ready(s));
}

// What gates make of the sums of a tile of them and of one beside it: row by row, while tiles multiply the next ones
class Gated {
  public:
    Gated(const Bf16Gate *gate, float *sums) : gate_(gate), room_(sums), next_(sums + kSumsFloats) {}
    float *room() const { return room_; }  // for sums [rows][2 tiles]
    // What is in the room, after all that was there before
    void begin(int64_t row, int64_t rows, const Tiles &at) {
        finish();
        sums_ = room_;
        std::swap(room_, next_);
        row_ = row;
        rows_ = rows;
        done_ = 0;
        place_ = at.first / 2 * kTileValues + at.first % 2 * kTile;
        last_ = at.first + 1 == at.apart && at.apart % 2;  // of an odd number
    }
    void upto(int64_t part, int64_t parts) {
        if (done_ == rows_) return;
        for (const int64_t end = rows_ * part / parts; done_ < end; ++done_) {
            const float *sums = sums_ + done_ * 2 * kTile;
            const __m256bh result = _mm512_cvtneps_pbh(Lanes::mul(activate(gate_->activation, Lanes::load(sums)), Lanes::load(sums + kTile)).v);
            uint16_t *to = gate_->to.at(row_ + done_, gate_->stretches) + place_;
            _mm256_store_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<const __m256i &>(result));
            if (last_) _mm256_store_si256(reinterpret_cast<__m256i *>(to + kTile), _mm256_setzero_si256());
        }
    }
    void finish() { upto(1, 1); }

  private:
    const Bf16Gate *gate_;
    float *room_, *next_;
    const float *sums_ = nullptr;
    int64_t row_ = 0, rows_ = 0, done_ = 0, place_ = 0;
    bool last_ = false;
};

// Up to M groups of rows x N tiles, what `product` sums
template <int M, int N, typename P>
void rows_of_tiles(const Bf16Piece &p, int64_t row, int64_t rows, int64_t group, const Tiles &at, Gated &gated, const P &product) {
    const Weight &w = *p.weight;
    float *sums = gated.room();
    product(p.x.at(row, stretches(w)));
    if (p.gate) {
        store_sums<M, N>(sums, 2 * kTile, group);
        written_for_tiles();
        return gated.begin(row, rows, at);
    }
    float *y = p.y + row * p.y_stride + at.first * kTile;
    if (rows == M * group && (at.first + N) * kTile <= w.columns && !w.bias) return store_sums<M, N>(y, p.y_stride, group);
    store_sums<M, N>(sums, 2 * kTile, group);
    written_for_tiles();
    for (int64_t r = 0; r < rows; ++r)
        for (int n = 0; n < N; ++n) {
            const int64_t column = at.tile(n) * kTile;
            V::store(y + r * p.y_stride + n * kTile, _mm512_loadu_ps(sums + (2 * r + n) * kTile), w.bias ? w.bias + column : nullptr, w.columns - column);
        }
}

// All rows x N tiles. The first rows pass while weights are made, or after that where a stretch may have several scales.
template <Format F, int N>
void tiles(const Bf16Piece &p, const Tiles &at, int64_t group, uint8_t *panels, Gated &gated) {
    const Weight &w = *p.weight;
    const int64_t count = stretches(w);
    const int64_t last = p.row_end - p.row <= 2 * group && count >= kRing ? kRing - 1 : -1;
    bool made = w.block_k % kStretch != 0;
    if (made)
        for (int n = 0; n < N; ++n) make<F>(w, at.tile(n), panels + n * count * kPanelBytes);
    written_for_tiles();
    for (int64_t row = p.row; row < p.row_end; row += 2 * group, made = true) {
        const int64_t rows = std::min(p.row_end - row, 2 * group);
        const auto between = [&](int64_t part, int64_t parts) { gated.upto(part, parts); };
        if (rows > group) rows_of_tiles<2, N>(p, row, rows, group, at, gated, [&](const uint16_t *x) { made ? multiply<2, N>(x, panels, count, between) : make_and_multiply<F, 2, N>(w, at, x, panels, last); });
        else rows_of_tiles<1, N>(p, row, rows, group, at, gated, [&](const uint16_t *x) { made ? multiply<1, N>(x, panels, count, between) : make_and_multiply<F, 1, N>(w, at, x, panels, last); });
    }
}

template <Format F>
void all_tiles(const Bf16Piece &p, uint8_t *scratch) {
    const int64_t group = std::min(p.row_end - p.row, kGroupRows);
    Gated gated(p.gate, reinterpret_cast<float *>(scratch + 2 * stretches(*p.weight) * kPanelBytes));
    const Configured configured(config(group));
    const Tiles pair = p.gate ? Tiles{p.tile, p.weight->tiles() / 2, 1} : Tiles{p.tile, 1, 2};  // a gate beside what it is for
    int64_t tile = p.tile;
    for (; tile + pair.step <= p.tile_end; tile += pair.step) tiles<F, 2>(p, {tile, pair.apart, pair.step}, group, scratch, gated);
    if (tile < p.tile_end) tiles<F, 1>(p, {tile, 1, 1}, group, scratch, gated);
    gated.finish();
}

void piece(const Bf16Piece &p, void *scratch) {
    auto *memory = static_cast<uint8_t *>(scratch);
    switch (p.weight->format) {
        case Format::INT8: return all_tiles<Format::INT8>(p, memory);
        case Format::BOOK4: return all_tiles<Format::BOOK4>(p, memory);
        default: return all_tiles<Format::INT4>(p, memory);
    }
}

}  // namespace

constinit const Bf16Functions bf16_amx = {round_rows, piece, true};

}  // namespace qforge
