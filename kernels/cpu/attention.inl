// What attention over paged blocks is made of, written once over `Lanes` (layers.inl): numbers and integers in rows, where keys and values lie, masks, and the softmax.

#include "activation.inl"

constexpr int64_t kLanes = 16;

// Numbers [count] in place: sixteen at a time through `pack`, to `Bytes` bytes each, and zeros up to a whole float
template <int Bytes, typename Pack>
inline void pack_row(float *x, int64_t count, const Pack &pack) {
    char *to = reinterpret_cast<char *>(x);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) pack(Lanes::load(x + i), to + Bytes * i);
    if (i == count) return;
    float last[kLanes] = {};
    __builtin_memcpy(last, x + i, static_cast<size_t>(count - i) * sizeof(float));
    pack(Lanes::load(last), last);
    __builtin_memcpy(to + Bytes * i, last, static_cast<size_t>((count - i) * Bytes + 3) / 4 * 4);
}

inline Lanes magnitudes(const float *x, int64_t count) {
    Lanes magnitude = Lanes::set(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) magnitude = Lanes::max_or_nan(magnitude, Lanes::load(x + i).magnitude());
    if (i < count) {
        float last[kLanes] = {};
        __builtin_memcpy(last, x + i, static_cast<size_t>(count - i) * sizeof(float));
        magnitude = Lanes::max_or_nan(magnitude, Lanes::load(last).magnitude());
    }
    return magnitude;
}

// Of 16 rows, what numbers are multiplied with to become integers, the largest +-`most`, and what these are to be multiplied with: NaN where a number is not finite
inline void units_of(const float *largest, float most, float *inverse, float *unit) {
    const Lanes all = Lanes::load(largest), least = Lanes::set(1e-30f), scale = Lanes::div(all, Lanes::set(most)), some = Lanes::max(scale, least);  // max gives its second argument where one is NaN
    Lanes::zero_below(some, least, Lanes::div(Lanes::set(1.0f), some)).store(inverse);
    Lanes::fma(all, Lanes::set(0.0f), scale).store(unit);
}

// Rows [rows][d] in place, as codes at the beginning of each, ties to even, the largest of a row +-127; their units
template <int Bytes, int Most, typename Pack>
inline void to_codes(float *x, int64_t rows, int64_t d, const Pack &pack, float *units) {
    static_assert(Most <= kLanes);
    Lanes magnitude[Most];
    float largest[kLanes] = {}, inverse[kLanes], unit[kLanes];
    for (int64_t r = 0; r < rows; ++r) magnitude[r] = magnitudes(x + r * d, d);
    Lanes::largest_or_nan(magnitude, rows, largest);
    units_of(largest, 127.0f, inverse, unit);
    for (int64_t r = 0; r < rows; ++r) {
        const Lanes by = Lanes::set(inverse[r]);
        pack_row<Bytes>(x + r * d, d, [&](const Lanes &numbers, void *to) { pack(Lanes::mul(numbers, by), to); });
        units[r] = unit[r];
    }
}

// A query's unit is not 0: of zeros, too, what is hidden, -infinity times that, is to stay so
inline float unit_of_query(float unit) { return unit == 0.0f ? 1.0f : unit; }

// The same for queries
template <int Bytes, int Most, typename Pack>
inline void query_codes(float *queries, int64_t rows, int64_t d, const Pack &pack, float *units) {
    to_codes<Bytes, Most>(queries, rows, d, pack, units);
    for (int64_t r = 0; r < rows; ++r) units[r] = unit_of_query(units[r]);
}

// Keys and queries [d] in int8 are turned alike before they are rounded, by a Hadamard matrix of d's power of two for each so many dimensions: outliers then spread over all of them (QuaRot, arXiv 2404.00456),
// and products of the two stay what they were, times turned(d). In steps of one shape, so that they are vectors: the results' order is the matrix's, permuted.
inline int64_t turned(int64_t d) { return d & -d; }

inline void turn_step(const float *__restrict from, float *__restrict to, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = from[i], b = from[i + half];
        to[2 * i] = a + b;
        to[2 * i + 1] = a - b;
    }
}

template <int64_t N>
inline void turn_by(float *x, int64_t n) {
    float other[kLongestIntegerHead], *from = x, *to = other;
    for (int64_t step = 1; step < (N ? N : n); step *= 2, std::swap(from, to)) turn_step(from, to, (N ? N : n) / 2);
    if (from != x) __builtin_memcpy(x, from, static_cast<size_t>(n) * sizeof(float));
}

inline void turn(float *x, int64_t d) {
    const int64_t n = turned(d);
    for (float *end = x + d; x < end; x += n) switch (n) {
            case 64: turn_by<64>(x, n); break;  // registers hold all of it
            case 128: turn_by<128>(x, n); break;
            default: turn_by<0>(x, n);
        }
}

// Bf16 and int8: two dimensions of a key, two positions of a value side by side, which one instruction multiplies and adds
template <typename T>
constexpr int64_t kTogether = std::is_same_v<T, Bf16> || std::is_same_v<T, int8_t> ? 2 : 1;

// What a head has in a block, from 16 positions on
template <typename T>
struct Rows {
    T *keys, *values;
    float *key_scales, *value_scales;  // read where each key and value has one
};

// offset: of the first position in the block, a multiple of 16
template <typename T>
inline Rows<T> rows_at(const Cache &c, int64_t block, int64_t head, int64_t offset) {
    T *keys = reinterpret_cast<T *>(c.memory + block * c.block_bytes + head * c.head_bytes()), *values = keys + c.block_size * c.head_dim;
    float *scales = reinterpret_cast<float *>(values + c.block_size * c.value_dim());
    return {keys + offset * c.head_dim, values + offset * c.value_dim(), scales + offset, scales + c.block_size + offset};
}

// Walks over a sequence's positions, 16 at a time, from a multiple of 16 on
template <typename T>
class Tiles {
  public:
    Tiles(const Attention &a, const AttentionPiece &p, int64_t position)
        : first_(rows_at<T>(a.cache, 0, p.kv_head, 0)),
          block_(a.block_tables + p.sequence * a.table_stride + position / a.cache.block_size),
          block_bytes_(a.cache.block_bytes),
          block_size_(a.cache.block_size),
          head_dim_(a.cache.head_dim),
          value_dim_(a.cache.value_dim()),
          offset_(position % a.cache.block_size) {}
    Rows<T> rows() const {
        const int64_t block = *block_ * block_bytes_;
        return {at(first_.keys, block) + offset_ * head_dim_, at(first_.values, block) + offset_ * value_dim_, at(first_.key_scales, block) + offset_, at(first_.value_scales, block) + offset_};
    }
    void next() {
        offset_ += 16;
        if (offset_ == block_size_) {
            offset_ = 0;
            ++block_;
        }
    }

  private:
    template <typename U>
    static U *at(U *p, int64_t bytes) { return reinterpret_cast<U *>(reinterpret_cast<char *>(p) + bytes); }

    Rows<T> first_;  // of block 0
    const int32_t *block_;
    int64_t block_bytes_, block_size_, head_dim_, value_dim_, offset_;
};

// The first position that a row sees
inline int64_t oldest_seen(const Attention &a, int64_t position) { return a.window ? position - a.window + 1 : 0; }

// Whether rows at `position` and after it, up to `last_position`, see all of `count` positions from k on
inline bool all_seen(const Attention &a, int64_t position, int64_t last_position, int64_t k, int64_t count) { return k + count - 1 <= position && k >= oldest_seen(a, last_position); }

// Of 16 numbers for positions from k on, those that a row at `position` may not see become `hidden`.
inline Lanes seen(const Attention &a, int64_t position, int64_t k, Lanes numbers, float hidden) { return numbers.within(oldest_seen(a, position) - k, position - k, hidden); }

inline float largest_of_row(const float *scores, int64_t count) {
    Lanes most = Lanes::set(-__builtin_inff());
    for (int64_t k = 0; k < count; k += kLanes) most = Lanes::max(most, Lanes::load(scores + k));
    return most.largest();
}

// What softmax takes of a row
struct Softmax {
    Lanes largest, factor, sum;

    Softmax() = default;
    Softmax(const float *scores, int64_t count, float unit) : largest(Lanes::set(largest_of_row(scores, count))), factor(Lanes::set(unit * kLog2e)), sum(Lanes::set(0.0f)) {}
    Lanes operator()(const float *scores) {
        const Lanes x = exp2(Lanes::mul(Lanes::sub(Lanes::load(scores), largest), factor));
        sum = Lanes::add(sum, x);
        return x;
    }
};

// scores -> e^(unit (score - largest)), and one over their sum
inline float soften_row(float *scores, int64_t count, float unit) {
    Softmax softmax(scores, count, unit);
    for (int64_t k = 0; k < count; k += kLanes) softmax(scores + k).store(scores + k);
    return 1.0f / softmax.sum.sum();
}

// What scores are multiplied by, but for units of queries and scales of keys
inline float score_scale(const Attention &a) { return a.scale * a.cache.key_scale / static_cast<float>(a.cache.type == CacheType::I8 ? turned(a.cache.head_dim) : 1); }

// Scores [rows][stride] of the positions [first, last + 16), with `unit` each -> weights times the scales of values, and for each span put(those of its first position on, what makes codes of a row's, the
// largest 255, its first position, its tiles); their units [spans][Stride], and one over the sum of weights. What a row may not see stays 0, though the scale there may be NaN.
template <int Stride, typename Put>
inline void soften_codes(const Attention &a, const AttentionPiece &p, int64_t rows, const int64_t *position, const float *unit, int64_t first, int64_t last, float *scores, int64_t stride, float *units,
                         float *factor, const Put &put) {
    static_assert(Stride <= kLanes);
    Softmax softmax[Stride];
    Lanes largest[Stride];
    for (int64_t r = 0; r < rows; ++r) softmax[r] = Softmax(scores + r * stride, last - first + 16, unit[r]);
    Tiles<int8_t> tiles(a, p, first);
    for (int64_t k = first, end; k <= last; k = end, units += Stride) {
        end = std::min((k / kSpan + 1) * kSpan, last + 16);
        const int64_t count = (end - k) / 16;
        Rows<int8_t> at[kSpan / 16];
        for (int64_t i = 0; i < count; ++i, tiles.next()) at[i] = tiles.rows();
        const bool all = all_seen(a, position[0], position[rows - 1], k, end - k);
        float *span = scores + (k - first);
        for (int64_t r = 0; r < rows; ++r) {
            float *s = span + r * stride;
            largest[r] = Lanes::set(0.0f);
            for (int64_t i = 0; i < count; ++i) {
                Lanes x = Lanes::mul(softmax[r](s + i * 16), Lanes::load(at[i].value_scales));
                if (!all) x = seen(a, position[r], k + i * 16, x, 0.0f);
                x.store(s + i * 16);
                largest[r] = Lanes::max_or_nan(largest[r], x);
            }
        }
        float most[kLanes] = {}, inverse[kLanes], unit_of_row[kLanes];
        Lanes::largest_or_nan(largest, rows, most);
        units_of(most, 255.0f, inverse, unit_of_row);
        std::copy_n(unit_of_row, Stride, units);
        put(span, inverse, k, count);
    }
    for (int64_t r = 0; r < rows; ++r) factor[r] = 1.0f / softmax[r].sum.sum();
}

// weights of a row from `first` on *= the scale of each position's value, 0 for what it may not see, as above
template <typename T>
inline void scale_weights(const Attention &a, const AttentionPiece &p, int64_t position, float *weights, int64_t first, int64_t last) {
    Tiles<T> tiles(a, p, first);
    for (int64_t k = first; k <= last; k += 16, tiles.next(), weights += 16) {
        const Lanes x = Lanes::mul(Lanes::load(weights), Lanes::load(tiles.rows().value_scales));
        seen(a, position, k, x, 0.0f).store(weights);
    }
}
