// The functions of layers.h, written once over `Lanes` (16 floats), which the including file defines for its instruction set.
// Lanes: load (floats, halves, FP8 codes divided by kFp8), store, set, fma(a, b, c) = a b + c, add, mul, div, max, exp_scale(p, n) = p 2^n for integral n, round,
//        keep_above(x, limit, y) = x > limit ? y : 0, to_bf16 and to_int16 (16 numbers, ties to even, into 32 bytes). to_half(x): the nearest half, ties to even.
// Also in the including file, both over 16 pairs of columns and one pair of a row, which lies in a float as prepare() packs it; see Fmas for the interface:
// kSums: sums over 16 columns that registers hold. IntegerDots, exact; Bf16Dots: in fp32, the second product is added first, then the first (as AVX512-BF16 does).

constexpr float kFp8 = 256.0f;

constexpr int64_t kLanes = 16;

inline float sum_in_order(const Lanes &a) {
    float v[kLanes];
    a.store(v);
    for (int i = 0; i < 8; ++i) v[i] += v[i + 8];
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// The largest of them; NaN is none
inline float largest_lane(const Lanes &a) {
    float v[kLanes], largest = -__builtin_inff();
    a.store(v);
    for (float x : v) largest = x > largest ? x : largest;
    return largest;
}

// e^x to about 1 ulp, exactly 0 below -87; the polynomial is Cephes' expf (S. Moshier)
inline Lanes exponential(Lanes x) {
    const Lanes clamped = Lanes::max(Lanes::min(x, Lanes::set(88.0f)), Lanes::set(-87.0f));
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
    return Lanes::keep_above(x, Lanes::set(-87.0f), Lanes::exp_scale(p, n));
}

void norm_row(const float *x, const float *weight, float *y, int64_t width, float eps) {
    Lanes sum = Lanes::set(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Lanes v = Lanes::load(x + i);
        sum = Lanes::fma(v, v, sum);
    }
    float rest = 0.0f;
    for (int64_t j = i; j < width; ++j) rest = __builtin_fmaf(x[j], x[j], rest);
    const float inverse = 1.0f / __builtin_sqrtf((sum_in_order(sum) + rest) / static_cast<float>(width) + eps);
    for (int64_t j = 0; j < width; ++j) y[j] = weight[j] * (x[j] * inverse);
}

void norm(const NormRows &n, int64_t row, int64_t row_end) {
    for (; row < row_end; ++row) norm_row(n.x + row * n.width, n.weight, n.y + row * n.width, n.width, n.eps);
}

void residual(const ResidualRows &r, int64_t row, int64_t row_end) {
    for (; row < row_end; ++row) {
        float *x = r.x + row * r.width, *next = r.next + row * r.width;
        const float *y = r.y + row * r.width;
        if (r.branch_weight) {
            norm_row(y, r.branch_weight, next, r.width, r.eps);
            y = next;
        }
        for (int64_t i = 0; i < r.width; ++i) x[i] += y[i];
        norm_row(x, r.weight, next, r.width, r.eps);
    }
}

inline Lanes activate(Activation kind, Lanes x) {
    const Lanes one = Lanes::set(1.0f);
    if (kind == Activation::SILU) return Lanes::div(x, Lanes::add(one, exponential(Lanes::mul(x, Lanes::set(-1.0f)))));
    // x/2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
    const Lanes cube = Lanes::mul(Lanes::mul(x, x), x);
    const Lanes u = Lanes::mul(Lanes::set(0.7978845608028654f), Lanes::fma(Lanes::set(0.044715f), cube, x));
    return Lanes::div(x, Lanes::add(one, exponential(Lanes::mul(u, Lanes::set(-2.0f)))));
}

void gate(const GateRows &g, int64_t row, int64_t row_end) {
    for (; row < row_end; ++row) {
        const float *x = g.x + row * 2 * g.width, *up = x + g.width;
        float *y = g.y + row * g.width;
        int64_t i = 0;
        for (; i + kLanes <= g.width; i += kLanes) Lanes::mul(activate(g.activation, Lanes::load(x + i)), Lanes::load(up + i)).store(y + i);
        if (i < g.width) {
            float last[kLanes] = {}, result[kLanes];
            for (int64_t j = i; j < g.width; ++j) last[j - i] = x[j];
            activate(g.activation, Lanes::load(last)).store(result);
            for (int64_t j = i; j < g.width; ++j) y[j] = result[j - i] * up[j];
        }
    }
}

void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

// The nearest bf16, ties to even; finite where x is
inline Bf16 to_bf16(float x) {
    constexpr float most = 0x1.fep127f;
    const uint32_t bits = __builtin_bit_cast(uint32_t, x > most ? most : x < -most ? -most : x);
    return {static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Bf16 and int8: two dimensions of a key, two positions of a value side by side, which one instruction multiplies and adds
template <typename T>
constexpr int64_t kTogether = std::is_same_v<T, Bf16> || std::is_same_v<T, int8_t> ? 2 : 1;

// The nearest E4M3, ties to even, at most 448; NaN stays NaN
inline Fp8 to_fp8(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    uint32_t code = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;  // 3 bits of mantissa, the exponent's bias 127
    code -= (127 - 7) << 3;
    if (magnitude < 0x3c800000) code = __builtin_bit_cast(uint32_t, __builtin_fabsf(x) * 512.0f + 0x1p23f) & 15;  // below 2^-6: multiples of 2^-9
    if (magnitude >= 0x43e00000) code = magnitude > 0x7f800000 ? 0x7f : 0x7e;
    return {static_cast<uint8_t>(sign | code)};
}

inline float largest_of(const float *x, int64_t count) {
    float largest = 0.0f;
    for (int64_t i = 0; i < count; ++i) largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
    return largest;
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

// Numbers [count] in place, as integers of 16 bits, ties to even, the largest +-`most`; returns their unit, NaN where one of them is not finite
inline float to_codes(float *x, int64_t count, float most) {
    Lanes magnitude = Lanes::set(0.0f), wrong = magnitude;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Lanes v = Lanes::load(x + i);
        magnitude = Lanes::max(magnitude, Lanes::max(v, Lanes::mul(v, Lanes::set(-1.0f))));
        wrong = Lanes::fma(v, Lanes::set(0.0f), wrong);
    }
    float largest = largest_lane(magnitude), nan = sum_in_order(wrong);
    for (; i < count; ++i) {
        largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
        nan += x[i] * 0.0f;
    }
    const float scale = largest / most, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
    const Lanes factor = Lanes::set(inverse);
    pack_row(x, count, [&](const Lanes &numbers, void *to) { Lanes::to_int16(Lanes::mul(numbers, factor), to); });
    return scale + nan;
}

// One key or value [d] into the cache, element i at place(i); returns its scale: FP8's is given, or 0 for one of its own
template <typename Place>
inline float put(float *to, const float *from, int64_t d, float, Place place) {
    for (int64_t i = 0; i < d; ++i) to[place(i)] = from[i];
    return 1.0f;
}

template <typename Place>
inline float put(uint16_t *to, const float *from, int64_t d, float, Place place) {
    for (int64_t i = 0; i < d; ++i) to[place(i)] = to_half(from[i] > 65504.0f ? 65504.0f : from[i] < -65504.0f ? -65504.0f : from[i]);
    return 1.0f;
}

template <typename Place>
inline float put(Bf16 *to, const float *from, int64_t d, float, Place place) {
    for (int64_t i = 0; i < d; ++i) to[place(i)] = to_bf16(from[i]);
    return 1.0f;
}

template <typename Place>
inline float put(int8_t *to, const float *from, int64_t d, float, Place place) {
    float codes[kLongestIntegerHead];
    __builtin_memcpy(codes, from, static_cast<size_t>(d) * sizeof(float));
    const float scale = to_codes(codes, d, 127.0f);
    const char *low = reinterpret_cast<const char *>(codes);
    for (int64_t i = 0; i < d; ++i) {
        int16_t code;
        __builtin_memcpy(&code, low + 2 * i, 2);
        to[place(i)] = static_cast<int8_t>(code);
    }
    return scale;
}

template <typename Place>
inline float put(Fp8 *to, const float *from, int64_t d, float scale, Place place) {
    if (scale == 0.0f) {
        const float largest = largest_of(from, d);
        scale = largest > 1e-30f ? largest / 448.0f : 1.0f;
    }
    for (int64_t i = 0; i < d; ++i) to[place(i)] = to_fp8(from[i] / scale);
    return scale;
}

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

template <typename T>
void store_token(const Attention &a, int64_t token, const float *row) {
    const Cache &c = a.cache;
    const int64_t d = c.head_dim, block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size, k = offset % 16;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
        const float *key = row + (a.heads + h) * d, *value = row + (a.heads + c.kv_heads + h) * d;
        constexpr int64_t n = kTogether<T>;
        const Rows<T> at = rows_at<T>(c, block, h, offset - k);
        const float key_scale = put(at.keys + k * n, key, d, c.scaled ? 0.0f : c.key_scale, [](int64_t i) { return i / n * 16 * n + i % n; });
        const float value_scale = put(at.values + k / n * n * c.value_dim() + k % n, value, d, c.scaled ? 0.0f : c.value_scale, [](int64_t i) { return i * n; });
        if (c.scaled) {
            at.key_scales[k] = key_scale;
            at.value_scales[k] = value_scale;
        }
    }
}

// Values 0 for the positions of a tile after a token's, which weights of 0 will multiply: in blocks that another sequence left, NaN may lie there.
template <typename T>
void clear_after_token(const Attention &a, int64_t token) {
    const Cache &c = a.cache;
    const int64_t block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size;
    constexpr int64_t n = kTogether<T>;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
        const Rows<T> at = rows_at<T>(c, block, h, offset / 16 * 16);
        for (int64_t k = offset % 16 + 1; k < 16; ++k) {
            T *values = at.values + k / n * n * c.value_dim() + k % n;
            for (int64_t i = 0; i < c.value_dim(); ++i) values[i * n] = T{};
            if (c.scaled) at.value_scales[k] = 0.0f;
        }
    }
}

void clear_after(const Attention &a, int64_t token) {
    switch (a.cache.type) {
        case CacheType::F32: return clear_after_token<float>(a, token);
        case CacheType::F16: return clear_after_token<uint16_t>(a, token);
        case CacheType::I8: return clear_after_token<int8_t>(a, token);
        case CacheType::BF16: return clear_after_token<Bf16>(a, token);
        case CacheType::F8: return clear_after_token<Fp8>(a, token);
    }
}

void rotate_and_store(const Attention &a, int64_t token, int64_t token_end) {
    const Cache &c = a.cache;
    const int64_t d = c.head_dim, half = d / 2;
    for (; token < token_end; ++token) {
        float *row = a.qkv + token * a.row_stride();
        const float *cosine = a.cosines + a.positions[token] * half, *sine = a.sines + a.positions[token] * half;
        for (int64_t h = 0; h < a.heads + c.kv_heads; ++h) {
            const float *weight = h < a.heads ? a.q_norm : a.k_norm;
            if (weight) norm_row(row + h * d, weight, row + h * d, d, a.norm_eps);
            rotate(row + h * d, cosine, sine, half);
        }
        switch (c.type) {
            case CacheType::F32: store_token<float>(a, token, row); break;
            case CacheType::F16: store_token<uint16_t>(a, token, row); break;
            case CacheType::I8: store_token<int8_t>(a, token, row); break;
            case CacheType::BF16: store_token<Bf16>(a, token, row); break;
            case CacheType::F8: store_token<Fp8>(a, token, row); break;
        }
    }
}

// Walks over a sequence's positions, 16 at a time, from a multiple of 16 on
template <typename T>
class Tiles {
  public:
    Tiles(const Attention &a, const AttentionPiece &p, int64_t position)
        : cache_(&a.cache), head_(p.kv_head), block_(a.block_tables + p.sequence * a.table_stride + position / a.cache.block_size), offset_(position % a.cache.block_size) {}
    Rows<T> rows() const { return rows_at<T>(*cache_, *block_, head_, offset_); }
    void next() {
        offset_ += 16;
        if (offset_ == cache_->block_size) {
            offset_ = 0;
            ++block_;
        }
    }

  private:
    const Cache *cache_;
    int64_t head_;
    const int32_t *block_;
    int64_t offset_;
};

constexpr int64_t kAhead = 64;  // positions: with 16 a decode step of 32 sequences waits for memory a fifth of its attention

// Brings 16 positions of the cache, `bytes` each, before they are read: blocks lie anywhere, and the CPU does not guess where the next one is
inline void fetch(const void *rows, int64_t bytes) {
    for (int64_t i = 0; i < 16 * bytes; i += 64) __builtin_prefetch(static_cast<const char *>(rows) + i, 0, 3);
}

// One row's sums over 16 columns
template <typename T>
struct Fmas {
    using Columns = Lanes;
    Lanes v = Lanes::set(0.0f);
    static Columns load(const T *p) { return Lanes::load(p); }
    void add(const Columns &c, float x) { v = Lanes::fma(Lanes::set(x), c, v); }
    Lanes get() const { return v; }
};

template <typename T>
using Sums = std::conditional_t<std::is_same_v<T, int8_t>, IntegerDots, std::conditional_t<std::is_same_v<T, Bf16>, Bf16Dots, Fmas<T>>>;

// Queries or weights [count] in place, as Sums<T> takes them; returns what the sums are to be multiplied by.
template <typename T>
inline float prepare(float *, int64_t, T) {
    return 1.0f;
}

inline float prepare(float *, int64_t, Fp8) { return kFp8; }

inline float prepare(float *x, int64_t count, Bf16) {
    pack_row(x, count, [](const Lanes &v, void *to) { Lanes::to_bf16(v, to); });
    return 1.0f;
}

inline float prepare(float *x, int64_t count, int8_t) { return to_codes(x, count, 32767.0f); }

// Rows go over several tiles of keys, or of columns of values, at once, where registers hold their sums (kSums): a sum waits for itself.
constexpr int together(int rows) { return kSums >= 4 * rows ? 4 : kSums >= 2 * rows ? 2 : 1; }

// Rows [R][count] -> [count][R]
template <int R>
inline void interleave(const float *rows, int64_t stride, int64_t count, float *to) {
    for (int64_t i = 0; i < count; ++i)
        for (int r = 0; r < R; ++r) to[i * R + r] = rows[r * stride + i];
}

// Of 16 numbers for positions from k on, those that a row at `position` may not see become `hidden`.
inline void hide(const Attention &a, int64_t position, int64_t k, float *numbers, float hidden) {
    const int64_t oldest = a.window ? position - a.window + 1 : 0;
    if (k + 15 <= position && k >= oldest) return;
    for (int64_t j = 0; j < 16; ++j)
        if (k + j > position || k + j < oldest) numbers[j] = hidden;
}

// score_rows for N tiles of 16 keys, the first of them k
template <typename T, int R, int N>
inline void score_tiles(const Attention &a, const float *query, const float *units, const int64_t *position, const Rows<T> (&at)[N], int64_t k, float *scores, int64_t stride) {
    const int64_t d = a.cache.head_dim;
    Sums<T> sums[N][R];
    for (int64_t i = 0; i < d / kTogether<T>; ++i, query += R)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const auto columns = Sums<T>::load(at[n].keys + i * 16 * kTogether<T>);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) sums[n][r].add(columns, query[r]);
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n, k += 16, scores += 16) {
        Lanes scale = Lanes::set(a.scale * a.cache.key_scale);
        if (a.cache.scaled) scale = Lanes::mul(scale, Lanes::load(at[n].key_scales));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            float *s = scores + r * stride;
            Lanes::mul(Lanes::mul(sums[n][r].get(), Lanes::set(units[r])), scale).store(s);
            hide(a, position[r], k, s, -__builtin_inff());
        }
    }
}

// scores [R][stride] of the keys [first, last + 16) for R prepared query rows, interleaved, times units [R]; what a row may not see becomes -infinity
template <typename T, int R>
void score_rows(const Attention &a, const AttentionPiece &p, const float *query, const float *units, const int64_t *position, int64_t first, int64_t last, bool cold, float *scores,
                int64_t stride) {
    constexpr int N = together(R);
    Tiles<T> tiles(a, p, first), ahead = tiles;
    int64_t k = first, fetched = first;
    const auto take = [&] {
        for (; cold && fetched <= last && fetched <= k + kAhead; fetched += 16, ahead.next()) fetch(ahead.rows().keys, a.cache.head_dim * sizeof(T));
        const Rows<T> at = tiles.rows();
        if (cold) fetch(at.values, a.cache.value_dim() * sizeof(T));
        tiles.next();
        return at;
    };
    for (; k + 16 * (N - 1) <= last; k += 16 * N) {
        Rows<T> at[N];
        for (Rows<T> &rows : at) rows = take();
        score_tiles<T, R, N>(a, query, units, position, at, k, scores + (k - first), stride);
    }
    for (; k <= last; k += 16) {
        const Rows<T> at[1] = {take()};
        score_tiles<T, R, 1>(a, query, units, position, at, k, scores + (k - first), stride);
    }
}

// scores -> e^(score - largest), and one over their sum
float soften_row(float *scores, int64_t count) {
    Lanes most = Lanes::set(-__builtin_inff());
    for (int64_t k = 0; k < count; k += kLanes) most = Lanes::max(most, Lanes::load(scores + k));
    const Lanes shift = Lanes::set(-largest_lane(most));
    Lanes sum = Lanes::set(0.0f);
    for (int64_t k = 0; k < count; k += kLanes) {
        const Lanes x = exponential(Lanes::add(Lanes::load(scores + k), shift));
        x.store(scores + k);
        sum = Lanes::add(sum, x);
    }
    return 1.0f / sum_in_order(sum);
}

// weights [R][stride] *= the scale of each position's value; what a row may not see stays 0, though the scale there may be NaN
template <typename T, int R>
void scale_weights(const Attention &a, const AttentionPiece &p, const int64_t *position, float *weights, int64_t stride, int64_t first, int64_t last) {
    Tiles<T> tiles(a, p, first);
    for (int64_t k = first; k <= last; k += 16, tiles.next()) {
        const Lanes scale = Lanes::load(tiles.rows().value_scales);
        for (int r = 0; r < R; ++r) {
            float *w = weights + r * stride + (k - first);
            Lanes::mul(Lanes::load(w), scale).store(w);
            hide(a, position[r], k, w, 0.0f);
        }
    }
}

// Positions whose sums stay exact in 32 bits: of integers, 512 x 127 x 32767
template <typename T>
constexpr int64_t kSpan = std::is_same_v<T, int8_t> ? 512 : INT64_MAX / 2;

// mix_values for N times 16 columns, the first of them i
template <typename T, int R, int N>
inline void mix_columns(const Attention &a, const AttentionPiece &p, const float *weights, int64_t stride, const float *factor, int64_t first, int64_t last, int64_t i, float *const *out) {
    constexpr int64_t n = kTogether<T>;
    const int64_t d = a.cache.head_dim, wide = a.cache.value_dim();
    Lanes total[N][R];
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m)
        for (int r = 0; r < R; ++r) total[m][r] = Lanes::set(0.0f);
    Tiles<T> tiles(a, p, first);
    for (int64_t k = first; k <= last;) {
        const int64_t end = (k / kSpan<T> + 1) * kSpan<T>;
        Sums<T> sums[N][R];
        const float *w[R];
        for (int r = 0; r < R; ++r) w[r] = weights + r * stride + (k - first) / n;
        for (; k <= last && k < end; k += 16, tiles.next()) {
            const T *values = tiles.rows().values + i * n;
            for (int64_t j = 0; j < 16 / n; ++j, values += wide * n)
#pragma GCC unroll 4
                for (int m = 0; m < N; ++m) {
                    const auto columns = Sums<T>::load(values + m * 16 * n);
#pragma GCC unroll 6
                    for (int r = 0; r < R; ++r) sums[m][r].add(columns, w[r][j]);
                }
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) w[r] += 16 / n;
        }
#pragma GCC unroll 4
        for (int m = 0; m < N; ++m)
            for (int r = 0; r < R; ++r) total[m][r] = Lanes::add(total[m][r], sums[m][r].get());
    }
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m, i += 16)
        for (int r = 0; r < R; ++r) {
            float v[kLanes];
            Lanes::mul(total[m][r], Lanes::set(factor[r])).store(v);
            for (int64_t j = 0; j < 16 && i + j < d; ++j) out[r][i + j] = v[j];
        }
}

// out[r] = prepared weights [R][stride] x values, times factor[r]
template <typename T, int R>
void mix_values(const Attention &a, const AttentionPiece &p, const float *weights, int64_t stride, const float *factor, int64_t first, int64_t last, float *const *out) {
    constexpr int N = together(R);
    int64_t i = 0;
    for (; i + 16 * (N - 1) < a.cache.head_dim; i += 16 * N) mix_columns<T, R, N>(a, p, weights, stride, factor, first, last, i, out);
    for (; i < a.cache.head_dim; i += 16) mix_columns<T, R, 1>(a, p, weights, stride, factor, first, last, i, out);
}

// R rows: row numbers count positions of the piece, and within each the heads of the group
template <typename T, int R>
void attend_rows(const Attention &a, const AttentionPiece &p, int64_t row, float *scratch) {
    const int64_t d = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
    float *query = scratch, *interleaved = query + kQueryRows * d, *scores = interleaved + kQueryRows * d, *out[R], units[R], factor[R];
    int64_t position[R];
    for (int r = 0; r < R; ++r) {
        const int64_t token = p.query + (row + r) / group, head = p.kv_head * group + (row + r) % group;
        const float *q = a.qkv + token * a.row_stride() + head * d;
        for (int64_t i = 0; i < d; ++i) query[r * d + i] = q[i];
        position[r] = a.positions[token];
        out[r] = a.out + (token * a.heads + head) * d;
    }
    const int64_t last = position[R - 1] / 16 * 16, oldest = a.window ? position[0] - a.window + 1 : 0;
    const int64_t first = oldest > 0 ? oldest / 16 * 16 : 0, stride = last - first + 16;
    for (int r = 0; r < R; ++r) units[r] = prepare(query + r * d, d, T{});
    interleave<R>(query, d, d / kTogether<T>, interleaved);
    score_rows<T, R>(a, p, interleaved, units, position, first, last, row == 0, scores, stride);
    for (int r = 0; r < R; ++r) factor[r] = soften_row(scores + r * stride, stride);
    if (a.cache.scaled) scale_weights<T, R>(a, p, position, scores, stride, first, last);
    for (int r = 0; r < R; ++r) factor[r] *= prepare(scores + r * stride, stride, T{}) * a.cache.value_scale;
    mix_values<T, R>(a, p, scores, stride, factor, first, last, out);
}

template <typename T>
void attend_piece(const Attention &a, const AttentionPiece &p, float *scratch) {
    const int64_t rows = (p.query_end - p.query) * (a.heads / a.cache.kv_heads);
    int64_t row = 0;
    for (; row + kQueryRows <= rows; row += kQueryRows) attend_rows<T, kQueryRows>(a, p, row, scratch);
    switch (rows - row) {
        case 1: return attend_rows<T, 1>(a, p, row, scratch);
        case 2: return attend_rows<T, 2>(a, p, row, scratch);
        case 3: return attend_rows<T, 3>(a, p, row, scratch);
        case 4: return attend_rows<T, 4>(a, p, row, scratch);
        case 5: return attend_rows<T, 5>(a, p, row, scratch);
        default: return;
    }
}

void attend(const Attention &a, const AttentionPiece &p, float *scratch) {
    switch (a.cache.type) {
        case CacheType::F32: return attend_piece<float>(a, p, scratch);
        case CacheType::F16: return attend_piece<uint16_t>(a, p, scratch);
        case CacheType::I8: return attend_piece<int8_t>(a, p, scratch);
        case CacheType::BF16: return attend_piece<Bf16>(a, p, scratch);
        case CacheType::F8: return attend_piece<Fp8>(a, p, scratch);
    }
}
