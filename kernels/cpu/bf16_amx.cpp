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

constexpr int64_t kLead = 2;        // stretches that weights are made before they are multiplied
constexpr int64_t kNear = 12;       // stretches that codes are brought before they are read: a pair of tiles ahead, which may be 90 KiB, 2048 x 5632 takes 4 (32 rows) to 10 % (1 row) longer
constexpr int64_t kNearPanel = 24;  // stretches of two tiles that the L1 cache keeps: past it 2048 inputs take 3 to 5 % less, 576 7 % more
constexpr int64_t kRing = 4;        // stretches of a panel that rows pass but once: a whole one would drive activations out of the L1 cache

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

// What store_sums stored
template <int M, int N>
inline void take_sums(const float *from, int64_t stride) {
    _tile_loadd(0, from, stride * 4);
    if constexpr (N == 2) _tile_loadd(1, from + kTile, stride * 4);
    if constexpr (M == 2) _tile_loadd(2, from + kGroupRows * stride, stride * 4);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, from + kGroupRows * stride + kTile, stride * 4);
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

// M groups of rows x N tiles whose panels of `count` stretches are there, and between(part, of parts) meanwhile. `next`: the second group. The L1 cache is for panels, where it can hold them (Past: it cannot).
template <int M, int N, bool Past, typename Between>
void multiply(const uint16_t *x, const uint16_t *next, const uint8_t *panels, int64_t count, const Between &between) {
    const uint8_t *second = panels + count * kPanelBytes;
    for (int64_t s = 0; s < count; ++s) {
        if constexpr (Past) _tile_stream_loadd(4, panels + s * kPanelBytes, 64);
        else _tile_loadd(4, panels + s * kPanelBytes, 64);
        _tile_stream_loadd(6, x + s * kTileValues, 64);
        _tile_dpbf16ps(0, 6, 4);
        if constexpr (N == 2) {
            if constexpr (Past) _tile_stream_loadd(5, second + s * kPanelBytes, 64);
            else _tile_loadd(5, second + s * kPanelBytes, 64);
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

// The same while the panels are made, kLead stretches ahead: `count` of them, the first of which is `begin`. `last`: the number of stretches that a panel holds, a power of two, less 1; -1: all.
template <Format F, int M, int N>
void make_and_multiply(const Weight &w, const Tiles &at, int64_t begin, int64_t count, const uint16_t *x, const uint16_t *next, uint8_t *panels, int64_t last) {
    constexpr int64_t kBytes = chunk_bytes(F), kMade = kPanelBytes / 4;  // of a chunk's codes and weights
    const int64_t tile_bytes = w.inputs() / 8 * kBytes, tile_scales = w.blocks * kTile, of_block = w.block_k / kStretch, near = std::min(kNear, count);
    const Codes<F> codes(w);
    const auto line = [&](int64_t n, int64_t block) { return Line<F>(w, at.tile(n) * tile_scales + block * kTile, at.step * tile_scales); };
    const auto ready = [&](int64_t s) {
        const uint8_t *panel = panels + (s & last) * kPanelBytes;
        return Stretch{panel, panel + count * kPanelBytes, x + s * kTileValues, next + s * kTileValues};
    };
    int64_t block = begin / of_block, left = (block + 1) * of_block - begin;
    Line<F> first = line(0, block), second = line(N - 1, block);
    const uint8_t *from = w.codes + at.first * tile_bytes + begin * 4 * kBytes;
    const auto stretch = [&](int64_t s, auto multiplied) {
        if (left == 0) {
            left = of_block;
            first = line(0, ++block);
            if constexpr (N == 2) second = line(1, block);
        }
        --left;
        const int64_t ahead = near * 4 * kBytes + (s < count - near ? 0 : at.step * tile_bytes - count * 4 * kBytes);  // past the end: in the tile that is next where this one is now
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

// What becomes of the sums of up to M groups of rows x N tiles
template <int M, int N>
void results(const Bf16Piece &p, int64_t row, int64_t rows, int64_t group, const Tiles &at, Gated &gated) {
    const Weight &w = *p.weight;
    float *sums = gated.room();
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

// Brings what results are stored to, a little at a time: asking for a whole square at once takes the few places for misses that loads of tiles need, and stores to memory that is not near wait for it.
template <int N>
class Bring {
  public:
    Bring(const Bf16Piece &p, int64_t row, int64_t rows, const Tiles &at) : to_(p.y + row * p.y_stride + at.first * kTile), stride_(p.y_stride), lines_(p.gate ? 0 : rows * N) {}
    void upto(int64_t part, int64_t parts) {
        for (const int64_t end = lines_ * part / parts; brought_ < end; ++brought_) __builtin_prefetch(to_ + brought_ / N * stride_ + brought_ % N * kTile, 1);
    }

  private:
    float *to_;
    int64_t stride_, lines_, brought_ = 0;
};

// Inputs that are multiplied before those after them: stretches [begin, end)
struct Slice {
    int64_t begin, end;
    float *sums;  // [groups of rows by twos], of slices before this one; of this one where more come

    int64_t count() const { return end - begin; }
};

// Up to M groups of rows x N tiles; panels are there, or made meanwhile
template <Format F, int M, int N>
void rows_of_tiles(const Bf16Piece &p, int64_t row, int64_t rows, int64_t group, const Tiles &at, const Slice &slice, uint8_t *panels, int64_t last, bool made, Gated &gated) {
    const Weight &w = *p.weight;
    const int64_t count = stretches(w);
    const uint16_t *x = p.x.at(row, count) + slice.begin * kTileValues, *next = x + count * kTileValues;
    float *sums = slice.sums + (row - p.row) / (2 * group) * kSumsFloats;
    const bool whole = slice.end == count;
    if (slice.begin) take_sums<M, N>(sums, 2 * kTile);
    else clear_sums<M, N>();
    if (made) {
        Bring<N> bring(p, row, whole ? rows : 0, at);
        const auto between = [&](int64_t part, int64_t parts) {
            gated.upto(part, parts);
            bring.upto(part, parts);
        };
        if (slice.count() > kNearPanel) multiply<M, N, true>(x, next, panels, slice.count(), between);
        else multiply<M, N, false>(x, next, panels, slice.count(), between);
    } else {
        make_and_multiply<F, M, N>(w, at, slice.begin, slice.count(), x, next, panels, last);
    }
    if (whole) return results<M, N>(p, row, rows, group, at, gated);
    store_sums<M, N>(sums, 2 * kTile, group);
    written_for_tiles();
}

// All rows x N tiles. The first rows pass while weights are made, or after that where a stretch may have several scales.
template <Format F, int N>
void tiles(const Bf16Piece &p, const Tiles &at, const Slice &slice, int64_t group, uint8_t *panels, Gated &gated) {
    const Weight &w = *p.weight;
    const int64_t last = p.row_end - p.row <= 2 * group && slice.count() >= kRing ? kRing - 1 : -1;
    bool made = w.block_k % kStretch != 0;
    if (made)
        for (int n = 0; n < N; ++n) make<F>(w, at.tile(n), panels + n * slice.count() * kPanelBytes);
    written_for_tiles();
    for (int64_t row = p.row; row < p.row_end; row += 2 * group, made = true) {
        const int64_t rows = std::min(p.row_end - row, 2 * group);
        if (rows > group) rows_of_tiles<F, 2, N>(p, row, rows, group, at, slice, panels, last, made, gated);
        else rows_of_tiles<F, 1, N>(p, row, rows, group, at, slice, panels, last, made, gated);
    }
}

// Slice by slice, of up to kSlicedTiles tiles at a time, so that the L2 cache keeps the rows' inputs of a slice
template <Format F>
void all_tiles(const Bf16Piece &p, uint8_t *scratch) {
    const Weight &w = *p.weight;
    const int64_t group = std::min(p.row_end - p.row, kGroupRows), count = stretches(w), slices = bf16_slices(w, p.row_end - p.row);
    float *room = reinterpret_cast<float *>(scratch + 2 * count * kPanelBytes), *sums = room + 2 * kSumsFloats;
    Gated gated(p.gate, room);
    const Configured configured(config(group));
    const Tiles pair = p.gate ? Tiles{p.tile, w.tiles() / 2, 1} : Tiles{p.tile, 1, 2};  // a gate beside what it is for
    const int64_t together = slices > 1 ? kSlicedTiles / 2 * pair.step : p.tile_end - p.tile, pairs_rows = (p.row_end - p.row + 2 * group - 1) / (2 * group);
    for (int64_t first = p.tile; first < p.tile_end; first += together)
        for (int64_t s = 0; s < slices; ++s) {
            Slice slice{s * count / slices, (s + 1) * count / slices, sums};
            int64_t tile = first;
            const int64_t end = std::min(first + together, p.tile_end);
            for (; tile + pair.step <= end; tile += pair.step, slice.sums += pairs_rows * kSumsFloats) tiles<F, 2>(p, {tile, pair.apart, pair.step}, slice, group, scratch, gated);
            if (tile < end) tiles<F, 1>(p, {tile, 1, 1}, slice, group, scratch, gated);
        }
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
