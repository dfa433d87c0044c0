// Sums of products of activations' codes and weights' codes over a stretch of inputs, and the walk over rows and tiles with weights that are brought meanwhile: written once for the instruction sets of x86.
// The file that includes this gives
//   V: 16 columns side by side; V::Weights 4 inputs of them; V::Sums sums of their products, from V::start(a number) on; V::whole(sum, offset): 32-bit integers, and the offset added where sums cannot start with it;
//   V::tiles(code rows): what registers hold.
// A code row is one byte of each code of a row: 16-bit codes make two. Z: all zero points of the weight are one number, whose products with codes are the offsets of sums.
#include <algorithm>
#include <numeric>

#include "qforge/blockwise.h"
#include "qforge/processor.h"

namespace qforge {
namespace {

// sums of C code rows x T tiles = offset(c) of code row c
template <int C, int N, typename Offset>
inline __attribute__((always_inline)) void start_sums(V::Sums (&sum)[C][N], const Offset &offset) {
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c)
        for (auto &s : sum[c]) s = V::start(offset(c));
}

// What a chunk of 8 inputs takes; Panel: unpacked, each half of it for itself
template <Format F, bool Panel>
constexpr int64_t kChunk = Panel ? 2 * sizeof(V::Weights) : chunk_bytes(F);

// sums += products over 4 inputs, one half of chunk `at`
template <Format F, bool Panel, int C, int T, typename... Codes>
inline __attribute__((always_inline)) void add_half(V::Sums (&sum)[C][T], const uint8_t *const (&chunk)[T], int64_t at, const int8_t *const (&row)[C], int half, Codes &...codes) {
    V::Weights w[T];
    for (int t = 0; t < T; ++t) {
        const uint8_t *from = chunk[t] + at * kChunk<F, Panel>;
        if constexpr (Panel) w[t] = V::load_bytes(from + half * sizeof(V::Weights));
        else w[t] = V::unpack<F>(from, half);
        (V::add_bytes(codes[t], w[t]), ...);
    }
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c) {
        const V::Inputs four = V::inputs(row[c] + 8 * at + 4 * half);
        for (int t = 0; t < T; ++t) V::add_products(sum[c][t], w[t], four);
    }
}

// sums += products over the next `chunks` chunks of 8 inputs; code row c has its codes at x + c * stride; codes: for each tile, bytes that become sums of the weights' codes, or none
template <Format F, bool Panel, int C, int T, typename... Codes>
inline __attribute__((always_inline)) void add_chunks(V::Sums (&sum)[C][T], const uint8_t *(&chunk)[T], const int8_t *x, int64_t stride, int64_t chunks, Codes &...codes) {
    const int8_t *row[C];
#pragma GCC unroll 6
    for (int c = 0; c < C; ++c) row[c] = V::pointer(x + c * stride);
#pragma GCC unroll 8
    for (int64_t i = 0; i < chunks; ++i) {
        add_half<F, Panel, C, T>(sum, chunk, i, row, 0, codes...);
        add_half<F, Panel, C, T>(sum, chunk, i, row, 1, codes...);
    }
    // One row reads a stream, whose lines stay nearly in order: memory's prefetchers go by that, GCC's scheduler does not (what it had made of a few more instructions in the loop was read at half of memory's speed; with two code rows this takes 3 to 6 %)
    if (!Panel && C == 1 && T == 1) asm volatile("" : : : "memory");
    for (int t = 0; t < T; ++t) chunk[t] += chunks * kChunk<F, Panel>;
}

// Whether sums of weights' codes are made of them, so that so few rows need not read them: they wait for memory, not for products
constexpr bool makes_sums(int64_t rows) { return rows <= 2; }

// Memory that is brought nearer while something else is computed, `step` bytes for each block of inputs
struct Ahead {
    const uint8_t *next, *end;
    int64_t step;

    bool left() const { return next < end; }
    void fetch() {
        for (const uint8_t *to = std::min(next + step, end); next < to; next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// Tiles that rows pass over in groups
struct Strip {
    int64_t tile, tile_end, rows, groups;
    bool stream = false;  // whether there is one group, which reads one tile after the other from memory

    int64_t tiles() const { return tile_end - tile; }
};

constexpr int64_t kNear = 3072;  // bytes

inline bool brings_near() {
    static const bool near = !__builtin_cpu_is("amdfam17h") && !is_zen4();  // neither Zen and Zen 2, which were not measured, nor Zen 4
    return near;
}

// What is brought while rows pass over a strip of tiles of `bytes` each.
// One group that reads one stream: what comes kNear later (or somewhat more, where a block is no whole number of lines), but for one row on Zen, Zen 2 and Zen 4: a Zen 4 reads its weights as fast as they come already and takes
// longer when they are brought ahead (2048 and 4096 inputs, a Xeon with AMX: 1 row 26.5 -> 29 GB/s, 2 rows 22 -> 25; a Zen 5: 41 -> 43 and 38 -> 44; a Zen 3: 1 row 23.5 -> 26; a Zen 4: 2 rows 24 -> 31, with AVX2 3 and 4 rows 25 -> 29 and 23 -> 25).
// Else as many tiles after the strip, two tiles or fewer a call: 32 rows then take 26 instead of 29 ms for all of SmolLM2's weights, 3 rows half the time.
inline Ahead next_tiles(const Weight &w, const uint8_t *from, int64_t bytes, const Strip &s) {
    if (w.blocks == 0) return {from, from, 0};
    const auto between = [&](int64_t first, int64_t end, int64_t step) { return Ahead{from + first, from + std::min(end, w.tiles() * bytes), (step + 63) / 64 * 64}; };
    if (s.stream && (s.rows > 1 || brings_near())) return between(s.tile * bytes + kNear, s.tile_end * bytes + kNear, bytes / w.blocks);
    const int64_t tiles = s.rows > 1 ? s.tiles() : 0, calls = s.groups * std::max<int64_t>(1, s.tiles() / 2);
    return between(s.tile_end * bytes, (s.tile_end + tiles) * bytes, tiles * bytes / (calls * w.blocks));
}

// Memory that is touched so often that it stays in the first cache: `lines` of it for each block of inputs, from its end on from its start
struct Touched {
    const int8_t *first, *end, *next;
    int64_t lines;

    void touch() {
        for (int64_t i = 0; i < lines; ++i) {
            fetch(next);
            next = end - next > 64 ? next + 64 : first;
        }
    }
    static void fetch(const int8_t *line) { asm volatile("prefetcht0 %0" : : "m"(*line)); }  // GCC drops a loop of nothing but __builtin_prefetch
};

// What few rows are multiplied with: their codes, and N arrays of numbers of their segments. A tile as large as the first cache drives them out of it before they come again, and while weights are waited for there is hardly a place left for what else is missing.
// As much as stays there beside a tile of 4 bits that passes through is touched a few times while it does; of more, and beside 8 bits, of whose time a row takes half as much, codes are brought shortly before they are multiplied. (Two threads of a Zen 4, 32 KiB, where memory gives 58 GB/s, of a plain read: 4096 inputs, 8 bits 81 -> 90 %, 16 bits 65 -> 77, 5632 inputs, 8 bits 77 -> 85.
// What is larger would be driven out all the same: 5632 inputs, 16 bits, one thread, 69 -> 60 %. Codes brought 64 bytes before are nearly as good as 128, 256 give half, 1 KiB nothing.)
template <int C, int N>
struct RowsNear {
    static constexpr int64_t kLarge = 24 << 10, kMost = 10 << 10, kBetween = 10 << 10, kLater = 128;  // bytes: a tile from which on it matters, what is touched, of a tile between two touches, before codes are multiplied
    Touched touched[1 + N]{};
    const bool large;
    bool keeps = false;

    // sizes: bytes of the codes and of each array
    RowsNear(const Weight &w, const void *const (&from)[1 + N], const int64_t (&sizes)[1 + N]) : large(C <= 2 && tile_bytes(w) > kLarge) {
        if (!large) return;
        keeps = w.format == Format::INT4 && std::accumulate(sizes, sizes + 1 + N, int64_t{0}) < kMost;
        for (int i = 0; keeps && i < 1 + N; ++i) {
            const auto *first = static_cast<const int8_t *>(from[i]);
            touched[i] = {first, first + sizes[i], first, (sizes[i] / 64 * (tile_bytes(w) / w.blocks) + kBetween - 1) / kBetween};
        }
    }
    // codes: those of the next `count` inputs
    void touch(const int8_t *codes, int64_t stride, int64_t count) {
        if constexpr (C <= 2) {
            if (!large) return;
            if (keeps) {
                for (Touched &t : touched) t.touch();
                return;
            }
            for (int c = 0; c < C; ++c)
                for (int64_t i = 0; i < count; i += 64) Touched::fetch(codes + c * stride + kLater + i);
        }
    }
};

// A weight's codes, scales and sums
struct WeightAhead {
    Ahead codes{}, scales{}, sums{};

    // pair_sums: null, or what is read in the place of the sums of codes
    void begin(const Weight &w, const Strip &s, const int32_t *pair_sums = nullptr) {
        const auto after = [&](const auto *from, int64_t numbers) { return next_tiles(w, reinterpret_cast<const uint8_t *>(from), numbers * static_cast<int64_t>(sizeof(*from)), s); };
        codes = after(w.codes, tile_bytes(w));
        scales = w.half_scales ? after(w.half_scales, w.blocks * kTile) : after(w.scales, w.blocks * kTile);
        if (pair_sums) sums = after(pair_sums, tile_sums(w));
        else if (!makes_sums(s.rows) && centered(w)) sums = after(w.code_sums, tile_sums(w));
    }
    bool left() const { return codes.left() || scales.left() || sums.left(); }
    void fetch() {
        codes.fetch();
        scales.fetch();
        sums.fetch();
    }
};

// A weight, and keys and values
struct AllAhead {
    CacheAhead *cache;
    WeightAhead weight;

    explicit AllAhead(CacheAhead *of_thread) : cache(of_thread) {}
    void begin(const Weight &w, const Strip &strip, const int32_t *pair_sums = nullptr) { weight.begin(w, strip, pair_sums); }
    bool left() const { return weight.left() || cache->left(); }
    // As CacheAhead's
    void fetch(int64_t products) {
        weight.fetch();
        cache->fetch(products);
    }
};

// The product of `rows` <= R rows with the next tiles, and how many tiles that were
template <int R, typename Product>
int64_t some_rows(Product &product, int64_t rows, int64_t row, int64_t tile, int64_t tiles) {
    if constexpr (R > 1)
        if (rows < R) return some_rows<R - 1>(product, rows, row, tile, tiles);
    constexpr int T = V::tiles(R * Product::kLimbs);
    if (tiles < T) {
        product.template compute<R, 1>(row, tile);
        return 1;
    }
    product.template compute<R, T>(row, tile);
    return T;
}

template <typename Product, typename Piece>
int64_t groups_of(const Piece &p) { return (p.row_end - p.row + Product::kMost - 1) / Product::kMost; }

// A piece [its rows] x [its tiles]: strips of tiles stay in the second-level cache while groups of rows, nearly equal ones, pass over them, over S tiles at a time, of which prepare(the first) is called before.
// Product: kLimbs bytes a code, kMost rows in registers, begin(strip), compute<R, T>(row, tile) for R rows x T tiles
template <int64_t S, typename Product, typename Piece, typename Prepare>
void all_rows(const Piece &p, Product product, const Prepare &prepare) {
    const int64_t rows = p.row_end - p.row, groups = groups_of<Product>(p);
    const bool stream = groups == 1 && V::tiles(static_cast<int>(rows * Product::kLimbs)) == 1;
    for (int64_t first = p.tile; first < p.tile_end; first += kWideTiles) {
        const Strip strip{first, std::min(p.tile_end, first + kWideTiles), rows, groups, stream};
        product.begin(strip);
        for (int64_t some = strip.tile; some < strip.tile_end; some += S) {
            prepare(some);
            for (int64_t row = p.row, left = groups, end = std::min(some + S, strip.tile_end); left > 0; --left) {
                const int64_t here = (p.row_end - row + left - 1) / left;
                for (int64_t tile = some; tile < end;) tile += some_rows<Product::kMost>(product, here, row, tile, end - tile);
                row += here;
            }
        }
    }
}

template <typename Product, typename Piece>
void all_rows(const Piece &p, const Product &product) {
    all_rows<kWideTiles>(p, product, [](int64_t) {});
}

}  // namespace
}  // namespace qforge
