// What attention over paged blocks is made of, written once over `Lanes` (layers.inl): numbers and integers in rows, where keys and values lie, masks, and the softmax.

constexpr int64_t kLanes = 16;

// e^x to about 1 ulp, exactly 0 below -87, NaN of NaN (min and max give their second argument where one is NaN); the polynomial is Cephes' expf (S. Moshier)
inline Lanes exponential(Lanes x) {
    const Lanes clamped = Lanes::max(Lanes::set(-87.0f), Lanes::min(Lanes::set(88.0f), x));
    const Lanes n = Lanes::round(Lanes::mul(clamped, Lanes::set(1.44269504088896341f)));
    Lanes r = Lanes::fma(n, Lanes::set(-0.693359375f), clamped);
    r = Lanes::fma(n, Lanes::set(2.12194440e-4f), r);
    Lanes p = Lanes::set(1.9875691500e-4f);
    p = Lanes::fma(p, r, Lanes::set(1.3981999507e-3f));
    p = Lanes::fma(p, r, Lanes::set(8.3334519073e-3f));
    p = Lanes::fma(p, r, Lanes::set(4.1665795894e-2f));
    p = Lanes::fma(p, r, Lanes::set(1.6666665459e-1f));
    p = Lanes::fma(p, r, Lanes::set(5.0000001201e-1f));
    p = Lanes::add(Lanes::fma(p, Lanes::mul(r, r), r), Lanes::set(1.0f));
    return Lanes::zero_below(x, Lanes::set(-87.0f), Lanes::exp_scale(p, n));
}

// Numbers [count] in place: sixteen at a time through `pack`, to 16 bits each
template <typename Pack>
inline void pack_row(float *x, int64_t count, const Pack &pack) {
    char *to = reinterpret_cast<char *>(x);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) pack(Lanes::load(x + i), to + 2 * i);
    if (i == count) return;
    float last[kLanes] = {};
    __builtin_memcpy(last, x + i, static_cast<size_t>(count - i) * sizeof(float));
    pack(Lanes::load(last), last);
    __builtin_memcpy(to + 2 * i, last, static_cast<size_t>(count - i) * 2);
}

// What numbers are multiplied with to become integers, and what these are to be multiplied with: NaN where a number is not finite
struct Unit {
    float inverse, unit;
};

// Of numbers [count], the largest of which becomes +-`most`
inline Unit unit_of(const float *x, int64_t count, float most) {
    Lanes magnitude = Lanes::set(0.0f), wrong = magnitude;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes v = Lanes::load(x + i);
        magnitude = Lanes::max(magnitude, Lanes::max(v, Lanes::mul(v, Lanes::set(-1.0f))));
        wrong = Lanes::fma(v, Lanes::set(0.0f), wrong);
    }
    float largest = magnitude.largest(), nan = wrong.sum();
    for (; i < count; ++i) {
        largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
        nan += x[i] * 0.0f;
    }
    const float scale = largest / most;
    return {scale > 1e-30f ? 1.0f / scale : 0.0f, scale + nan};
}

// Numbers [count] in place, as integers of 16 bits, ties to even; returns their unit
inline float to_codes(float *x, int64_t count, float most) {
    const Unit unit = unit_of(x, count, most);
    const Lanes factor = Lanes::set(unit.inverse);
    pack_row(x, count, [&](const Lanes &numbers, void *to) { Lanes::to_int16(Lanes::mul(numbers, factor), to); });
    return unit.unit;
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

// hide() where some of 16 numbers are not seen: apart, since that is rare
[[gnu::noinline]] inline void hide_some(int64_t oldest, int64_t position, int64_t k, float *numbers, float hidden) {
    for (int64_t j = 0; j < 16; ++j)
        if (k + j > position || k + j < oldest) numbers[j] = hidden;
}

// Of 16 numbers for positions from k on, those that a row at `position` may not see become `hidden`.
inline void hide(const Attention &a, int64_t position, int64_t k, float *numbers, float hidden) {
    const int64_t oldest = a.window ? position - a.window + 1 : 0;
    if (k + 15 > position || k < oldest) [[unlikely]] hide_some(oldest, position, k, numbers, hidden);
}

// scores -> e^(score - largest), and one over their sum
inline float soften_row(float *scores, int64_t count) {
    Lanes most = Lanes::set(-__builtin_inff());
    for (int64_t k = 0; k < count; k += kLanes) most = Lanes::max(most, Lanes::load(scores + k));
    const Lanes shift = Lanes::set(-most.largest());
    Lanes sum = Lanes::set(0.0f);
    for (int64_t k = 0; k < count; k += kLanes) {
        const Lanes x = exponential(Lanes::add(Lanes::load(scores + k), shift));
        x.store(scores + k);
        sum = Lanes::add(sum, x);
    }
    return 1.0f / sum.sum();
}

// weights [rows][stride] *= the scale of each position's value; what a row may not see stays 0, though the scale there may be NaN
template <typename T>
inline void scale_weights(const Attention &a, const AttentionPiece &p, int64_t rows, const int64_t *position, float *weights, int64_t stride, int64_t first, int64_t last) {
    Tiles<T> tiles(a, p, first);
    for (int64_t k = first; k <= last; k += 16, tiles.next()) {
        const Lanes scale = Lanes::load(tiles.rows().value_scales);
        for (int64_t r = 0; r < rows; ++r) {
            float *w = weights + r * stride + (k - first);
            Lanes::mul(Lanes::load(w), scale).store(w);
            hide(a, position[r], k, w, 0.0f);
        }
    }
}

// Positions whose sums stay exact in 32 bits: of integers, 512 x 127 x 32767
template <typename T>
constexpr int64_t kSpan = std::is_same_v<T, int8_t> ? 512 : INT64_MAX / 2;
