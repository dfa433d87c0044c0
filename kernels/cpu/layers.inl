// The functions of layers.h, written once over `Lanes` (8 floats), which the including file defines for its instruction set.
// Lanes: load (floats, halves or int8), store, set, fma(a, b, c) = a b + c, add, mul, div, max, exp_scale(p, n) = p 2^n for integral n, round,
//        keep_above(x, limit, y) = x > limit ? y : 0, pairs(p, even, odd): 8 pairs of bf16. to_half(x): the nearest half, ties to even.
// With QFORGE_BF16_DOTS the including file defines what is under that name here.

inline float sum_in_order(const Lanes &a, const Lanes &b) {
    float v[8];
    Lanes::add(a, b).store(v);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
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
    Lanes a = Lanes::set(0.0f), b = a;
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        const Lanes u = Lanes::load(x + i), v = Lanes::load(x + i + 8);
        a = Lanes::fma(u, u, a);
        b = Lanes::fma(v, v, b);
    }
    float rest = 0.0f;
    for (int64_t j = i; j < width; ++j) rest = __builtin_fmaf(x[j], x[j], rest);
    const float inverse = 1.0f / __builtin_sqrtf((sum_in_order(a, b) + rest) / static_cast<float>(width) + eps);
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
        for (; i + 8 <= g.width; i += 8) Lanes::mul(activate(g.activation, Lanes::load(x + i)), Lanes::load(up + i)).store(y + i);
        if (i < g.width) {
            float last[8] = {}, result[8];
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

// One key or value [d] into the cache, its elements `stride` apart; returns its scale
inline float put(float *to, const float *from, int64_t d, int64_t stride) {
    for (int64_t i = 0; i < d; ++i) to[i * stride] = from[i];
    return 1.0f;
}

inline float put(uint16_t *to, const float *from, int64_t d, int64_t stride) {
    for (int64_t i = 0; i < d; ++i) to[i * stride] = to_half(from[i] > 65504.0f ? 65504.0f : from[i] < -65504.0f ? -65504.0f : from[i]);
    return 1.0f;
}

inline float put(Bf16 *to, const float *from, int64_t d, int64_t stride) {
    for (int64_t i = 0; i < d; ++i) to[i * stride] = to_bf16(from[i]);
    return 1.0f;
}

inline float put(int8_t *to, const float *from, int64_t d, int64_t stride) {
    float largest = 0.0f;
    for (int64_t i = 0; i < d; ++i) largest = __builtin_fabsf(from[i]) > largest ? __builtin_fabsf(from[i]) : largest;
    const float scale = largest / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < d; ++i) {
        const float code = from[i] * inverse;
        const float inside = code > 127.0f ? 127.0f : code < -127.0f ? -127.0f : code;
        to[i * stride] = static_cast<int8_t>(inside + (inside < 0.0f ? -0.5f : 0.5f));
    }
    return scale;
}

template <typename T>
inline float put_key(T *tile, int64_t place, const float *from, int64_t d) {
    return put(tile + place, from, d, 16);
}

inline float put_key(Bf16 *tile, int64_t place, const float *from, int64_t d) {
    for (int64_t i = 0; i < d; ++i) tile[i / 2 * 32 + place * 2 + i % 2] = to_bf16(from[i]);
    return 1.0f;
}

template <typename T>
inline float put_value(T *head, int64_t place, const float *from, int64_t d, int64_t wide) {
    return put(head + place * wide, from, d, 1);
}

inline float put_value(Bf16 *head, int64_t place, const float *from, int64_t d, int64_t wide) {
    return put(head + place / 2 * 2 * wide + place % 2, from, d, 2);
}

template <typename T>
void store_token(const Attention &a, int64_t token, const float *row) {
    const Cache &c = a.cache;
    const int64_t d = c.head_dim, block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
        const float *key = row + (a.heads + h) * d, *value = row + (a.heads + c.kv_heads + h) * d;
        const int64_t first = (block * c.kv_heads + h) * c.block_size;
        const float key_scale = put_key(static_cast<T *>(c.keys) + (first + offset / 16 * 16) * d, offset % 16, key, d);
        const float value_scale = put_value(static_cast<T *>(c.values) + first * c.value_dim, offset, value, d, c.value_dim);
        if (c.key_scales) {
            c.key_scales[first + offset] = key_scale;
            c.value_scales[first + offset] = value_scale;
        }
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
        }
    }
}

// Where the 16 positions from `position` (a multiple of 16) of a sequence lie in the cache, in tokens of one head
inline int64_t cache_row(const Attention &a, const AttentionPiece &p, int64_t position) {
    const Cache &c = a.cache;
    const int64_t block = a.block_tables[p.sequence * a.table_stride + position / c.block_size];
    return (block * c.kv_heads + p.kv_head) * c.block_size + position % c.block_size;
}

// Brings 16 positions of the cache, `bytes` each, before they are read: blocks lie anywhere, and the CPU does not guess where the next one is
inline void fetch(const void *rows, int64_t bytes) {
    for (int64_t i = 0; i < 16 * bytes; i += 64) __builtin_prefetch(static_cast<const char *>(rows) + i, 0, 3);
}

// lo, hi (positions 0 to 7, 8 to 15) += query rows [R][d] x the keys of 16 positions
template <int R, typename T>
inline void add_scores(const float *query, int64_t d, const T *keys, Lanes *lo, Lanes *hi) {
    for (int64_t i = 0; i < d; ++i) {
        const Lanes u = Lanes::load(keys + i * 16), v = Lanes::load(keys + i * 16 + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const Lanes q = Lanes::set(query[r * d + i]);
            lo[r] = Lanes::fma(q, u, lo[r]);
            hi[r] = Lanes::fma(q, v, hi[r]);
        }
    }
}

// lo, hi (dimensions 0 to 7, 8 to 15) += weights [R][stride], 16 of each row from `from` on, x the values of 16 positions, whose rows are `wide`
template <int R, typename T>
inline void add_values(const float *weights, int64_t from, int64_t stride, const T *values, int64_t wide, Lanes *lo, Lanes *hi) {
    for (int64_t j = 0; j < 16; ++j) {
        const Lanes u = Lanes::load(values + j * wide), v = Lanes::load(values + j * wide + 8);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const Lanes x = Lanes::set(weights[r * stride + from + j]);
            lo[r] = Lanes::fma(x, u, lo[r]);
            hi[r] = Lanes::fma(x, v, hi[r]);
        }
    }
}

// Queries or weights [count] in place, as add_scores and add_values take them
template <typename T>
inline void prepare(float *, int64_t, T) {}

#ifndef QFORGE_BF16_DOTS
// lo, hi += 16 pairs x one pair of each row, `apart` floats from row to row: second products first
template <int R>
inline void add_pairs(const Bf16 *pairs, const float *rows, int64_t apart, Lanes *lo, Lanes *hi) {
    Lanes even_lo, odd_lo, even_hi, odd_hi;
    Lanes::pairs(pairs, even_lo, odd_lo);
    Lanes::pairs(pairs + 16, even_hi, odd_hi);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const Lanes even = Lanes::set(rows[r * apart]), odd = Lanes::set(rows[r * apart + 1]);
        lo[r] = Lanes::fma(even, even_lo, Lanes::fma(odd, odd_lo, lo[r]));
        hi[r] = Lanes::fma(even, even_hi, Lanes::fma(odd, odd_hi, hi[r]));
    }
}

template <int R>
inline void add_scores(const float *query, int64_t d, const Bf16 *keys, Lanes *lo, Lanes *hi) {
    for (int64_t i = 0; i < d; i += 2) add_pairs<R>(keys + i * 16, query + i, d, lo, hi);
}

template <int R>
inline void add_values(const float *weights, int64_t from, int64_t stride, const Bf16 *values, int64_t wide, Lanes *lo, Lanes *hi) {
    for (int64_t j = 0; j < 16; j += 2) add_pairs<R>(values + j * wide, weights + from + j, stride, lo, hi);
}

inline void prepare(float *x, int64_t count, Bf16) {
    for (int64_t i = 0; i < count; ++i) x[i] = __builtin_bit_cast(float, static_cast<uint32_t>(to_bf16(x[i]).bits) << 16);
}
#endif

// scores [R][stride] of the keys [first, last + 1) for R query rows [R][d]; what a row may not see becomes -infinity
template <typename T, int R>
void score_rows(const Attention &a, const AttentionPiece &p, const float *query, const int64_t *position, int64_t first, int64_t last, float *scores, int64_t stride) {
    const int64_t d = a.cache.head_dim;
    for (int64_t k = first; k <= last; k += 16) {
        const int64_t at = cache_row(a, p, k);
        const T *keys = static_cast<const T *>(a.cache.keys) + at * d;
        if (k + 16 <= last) fetch(static_cast<const T *>(a.cache.keys) + cache_row(a, p, k + 16) * d, d * sizeof(T));
        fetch(static_cast<const T *>(a.cache.values) + at * a.cache.value_dim, a.cache.value_dim * sizeof(T));
        Lanes lo[R], hi[R], scale_lo = Lanes::set(a.scale), scale_hi = scale_lo;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) lo[r] = hi[r] = Lanes::set(0.0f);
        add_scores<R>(query, d, keys, lo, hi);
        if (a.cache.key_scales) {
            scale_lo = Lanes::mul(scale_lo, Lanes::load(a.cache.key_scales + at));
            scale_hi = Lanes::mul(scale_hi, Lanes::load(a.cache.key_scales + at + 8));
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            float *s = scores + r * stride + (k - first);
            Lanes::mul(lo[r], scale_lo).store(s);
            Lanes::mul(hi[r], scale_hi).store(s + 8);
            const int64_t oldest = a.window ? position[r] - a.window + 1 : 0;
            if (k + 15 > position[r] || k < oldest)
                for (int64_t j = 0; j < 16; ++j)
                    if (k + j > position[r] || k + j < oldest) s[j] = -__builtin_inff();
        }
    }
}

// scores -> e^(score - largest), and one over their sum
float soften_row(float *scores, int64_t count) {
    Lanes most = Lanes::set(-__builtin_inff());
    for (int64_t k = 0; k < count; k += 8) most = Lanes::max(most, Lanes::load(scores + k));
    float v[8], largest = -__builtin_inff();
    most.store(v);
    for (float x : v) largest = x > largest ? x : largest;
    const Lanes shift = Lanes::set(-largest);
    Lanes a = Lanes::set(0.0f), b = a;
    for (int64_t k = 0; k < count; k += 16) {
        const Lanes x = exponential(Lanes::add(Lanes::load(scores + k), shift)), y = exponential(Lanes::add(Lanes::load(scores + k + 8), shift));
        x.store(scores + k);
        y.store(scores + k + 8);
        a = Lanes::add(a, x);
        b = Lanes::add(b, y);
    }
    return 1.0f / sum_in_order(a, b);
}

// weights [R][stride] *= the scale of each position's value; what a row may not see stays 0, whatever lies there
template <int R>
void scale_weights(const Attention &a, const AttentionPiece &p, float *weights, int64_t stride, int64_t first, int64_t last) {
    for (int64_t k = first; k <= last; k += 16) {
        const float *scale = a.cache.value_scales + cache_row(a, p, k);
        const Lanes lo = Lanes::load(scale), hi = Lanes::load(scale + 8);
        for (int r = 0; r < R; ++r) {
            float *w = weights + r * stride + (k - first);
            Lanes::mul(Lanes::load(w), lo).store(w);
            Lanes::mul(Lanes::load(w + 8), hi).store(w + 8);
        }
    }
}

template <typename T>
constexpr int64_t kTogether = std::is_same_v<T, Bf16> ? 2 : 1;  // positions of a value side by side

// out[r] = weights [R][stride] x values, times factor[r]
template <typename T, int R>
void mix_values(const Attention &a, const AttentionPiece &p, const float *weights, int64_t stride, const float *factor, int64_t first, int64_t last, float *const *out) {
    const int64_t d = a.cache.head_dim, wide = a.cache.value_dim;
    for (int64_t i = 0; i < d; i += 16) {
        Lanes lo[R], hi[R];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) lo[r] = hi[r] = Lanes::set(0.0f);
        for (int64_t k = first; k <= last; k += 16) {
            const T *values = static_cast<const T *>(a.cache.values) + cache_row(a, p, k) * wide + i * kTogether<T>;
            add_values<R>(weights, k - first, stride, values, wide, lo, hi);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            float v[16];
            Lanes::mul(lo[r], Lanes::set(factor[r])).store(v);
            Lanes::mul(hi[r], Lanes::set(factor[r])).store(v + 8);
            for (int64_t j = 0; j < 16 && i + j < d; ++j) out[r][i + j] = v[j];
        }
    }
}

// R rows: row numbers count positions of the piece, and within each the heads of the group
template <typename T, int R>
void attend_rows(const Attention &a, const AttentionPiece &p, int64_t row, float *scratch) {
    const int64_t d = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
    float *query = scratch, *scores = scratch + kQueryRows * d, *out[R], factor[R];
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
    prepare(query, R * d, T{});
    score_rows<T, R>(a, p, query, position, first, last, scores, stride);
    for (int r = 0; r < R; ++r) factor[r] = soften_row(scores + r * stride, stride);
    if (a.cache.value_scales) scale_weights<R>(a, p, scores, stride, first, last);
    prepare(scores, R * stride, T{});
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
    }
}
