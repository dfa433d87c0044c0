// The functions of layers.h, written once over `Lanes` (16 floats), which the including file defines for its instruction set.
// Lanes: sum() of lanes i and i + 8, then of neighbours, neighbouring pairs, and halves; largest(); load (floats, halves, FP8 codes divided by kFp8), store, set, fma(a, b, c) = a b + c, add, sub, mul, div, min, max,
//        magnitude, max_or_nan and largest_or_nan (of numbers from +0 up, or NaN, which then is the result), within(first, last, other) = only lanes [first, last] of it, exp_scale(x, p, n) = x <= -126 ? 0 : p 2^n for integral n,
//        guess_reciprocal(x) = what kReciprocal less the bits of x stands for, round, zero_below(x, limit, y) = x <= limit ? 0 : y, to_bf16 and to_int16 (16 numbers, ties to even, into 32 bytes), to_bytes (-127 to 127, into 16). to_half(x): the nearest half, ties to even.
// Also in the including file: kSums, how many sums over 16 columns registers hold; and, over 16 columns and as many codes of a row as a float holds (see Fmas for the interface):
// KeyDots and ValueDots of int8, exact, whose codes their pack() makes: of one vector, or, where beside(rows) is not 0, of all rows, side by side; put_every_second; Bf16Dots: in fp32, the second product is added first, then the first (as AVX512-BF16 does).

#include "attention.inl"

constexpr float kFp8 = 256.0f;

void norm_row(const float *x, const float *weight, float *y, int64_t width, float eps) {
    Lanes sum = Lanes::set(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Lanes v = Lanes::load(x + i);
        sum = Lanes::fma(v, v, sum);
    }
    float rest = 0.0f;
    for (int64_t j = i; j < width; ++j) rest = __builtin_fmaf(x[j], x[j], rest);
    const float inverse = 1.0f / __builtin_sqrtf((sum.sum() + rest) / static_cast<float>(width) + eps);
    for (int64_t j = 0; j < width; ++j) y[j] = weight[j] * (x[j] * inverse);
}

void norm(const NormRows &n, int64_t row, int64_t row_end) {
    for (; row < row_end; ++row) {
        const float *x = n.x + row * n.width;
        float *y = n.y + row * n.width;
        if (n.weight) norm_row(x, n.weight, y, n.width, n.eps);
        else std::copy_n(x, n.width, y);
    }
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
        if (r.weight) norm_row(x, r.weight, next, r.width, r.eps);
        else std::copy_n(x, r.width, next);
    }
}

void gate(const GateRows &g, int64_t row, int64_t row_end) {
    const int64_t next_row = row_end - row > 1 ? 2 * g.width : 0;  // of many, the one after the last is the next call's
    for (; row < row_end; ++row) {
        const float *x = g.x + row * 2 * g.width, *up = x + g.width;
        float *y = g.y + row * g.width;
        int64_t i = 0;
        for (; i + kLanes <= g.width; i += kLanes) {
            // The next row's: what many rows gave lies in the last cache or with another thread, and the CPU looks ahead within a page only (SmolLM2's prompts, a Zen 5: 1.3 % of the mixed load)
            __builtin_prefetch(x + next_row + i);
            __builtin_prefetch(up + next_row + i);
            Lanes::mul(activate(g.activation, Lanes::load(x + i)), Lanes::load(up + i)).store(y + i);
        }
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
inline float put(Fp8 *to, const float *from, int64_t d, float scale, Place place) {
    if (scale == 0.0f) {
        const float largest = largest_of(from, d);
        scale = largest > 1e-30f ? largest / 448.0f : 1.0f;
    }
    for (int64_t i = 0; i < d; ++i) to[place(i)] = to_fp8(from[i] / scale);
    return scale;
}

template <typename T>
void store_token(const Attention &a, int64_t token, float *row) {
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

// Keys and values are made codes where they are; put_every_second(codes, count, to, odd): to[2 i + odd] = codes[i], and nothing else is written: another thread may be at the other ones.
template <>
void store_token<int8_t>(const Attention &a, int64_t token, float *row) {
    constexpr int64_t kMost = 8;  // rows at once
    const Cache &c = a.cache;
    const int64_t d = c.head_dim, block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size, k = offset % 16;
    for (int64_t first = 0; first < 2 * c.kv_heads; first += kMost) {
        const int64_t count = std::min(kMost, 2 * c.kv_heads - first);
        float *numbers = row + (a.heads + first) * d, scales[kMost];
        to_codes<1, kMost>(numbers, count, d, [](const Lanes &x, void *to) { Lanes::to_bytes(x, to); }, scales);
        for (int64_t r = 0; r < count; ++r) {
            const bool is_key = first + r < c.kv_heads;
            const Rows<int8_t> at = rows_at<int8_t>(c, block, (first + r) % c.kv_heads, offset - k);
            const auto *codes = reinterpret_cast<const int8_t *>(numbers + r * d);
            int8_t *key = at.keys + 2 * k;
            if (is_key)
                for (int64_t i = 0; i < d / 2; ++i) __builtin_memcpy(key + i * 32, codes + 2 * i, 2);
            else
                put_every_second(codes, d, at.values + k / 2 * 2 * c.value_dim(), k % 2);
            (is_key ? at.key_scales : at.value_scales)[k] = scales[r];
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
        int64_t k = offset % 16 + 1;
        if (k == 16) return;
        if (c.scaled) std::fill(at.value_scales + k, at.value_scales + 16, 0.0f);
        for (; k % n; ++k)
            for (int64_t i = 0; i < c.value_dim(); ++i) at.values[k / n * n * c.value_dim() + i * n + k % n] = T{};
        std::fill(at.values + k * c.value_dim(), at.values + 16 * c.value_dim(), T{});
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
        if (a.whole_norms) {
            norm_row(row, a.q_norm, row, a.heads * d, a.norm_eps);
            norm_row(row + a.heads * d, a.k_norm, row + a.heads * d, c.kv_heads * d, a.norm_eps);
        }
        for (int64_t h = 0; h < a.heads + c.kv_heads; ++h) {
            const float *weight = h < a.heads ? a.q_norm : a.k_norm;
            if (weight && !a.whole_norms) norm_row(row + h * d, weight, row + h * d, d, a.norm_eps);
            rotate(row + h * d, cosine, sine, half);
            if (c.type == CacheType::I8) turn(row + h * d, d);
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

constexpr int64_t kAhead = 128;  // positions

// Brings 16 positions of the cache, `bytes` each, before they are read: blocks lie anywhere, and the CPU does not guess where the next one is. Into the second cache, since the first one has few
// places for what is on its way: 2 KB anywhere come at 20 GB/s instead of 13, and attention of one sequence at 3,500 positions takes 2.6 instead of 3.6 ms (SmolLM2, Zen 4).
inline void fetch(const void *rows, int64_t bytes) {
    for (int64_t i = 0; i < 16 * bytes; i += 64) __builtin_prefetch(static_cast<const char *>(rows) + i, 0, 2);
}

// One row's sums over 16 columns
template <typename T>
struct Fmas {
    using Columns = Lanes;
    static constexpr int64_t kCodes = 1;  // of a row, that lie in a float
    Lanes v = Lanes::set(0.0f);
    static Fmas from(int32_t) { return {}; }  // sums of integers that begin with a number
    static Columns key(const T *p) { return Lanes::load(p); }
    static Columns value(const T *p, int64_t) { return Lanes::load(p); }
    void add(const Columns &c, const float &x) { v = Lanes::fma(Lanes::set(x), c, v); }
    Lanes get() const { return v; }
};

template <typename T, typename Integers>
using Dots = std::conditional_t<std::is_same_v<T, int8_t>, Integers, std::conditional_t<std::is_same_v<T, Bf16>, Bf16Dots, Fmas<T>>>;

template <typename T>
using KeySums = Dots<T, KeyDots>;
template <typename T>
using ValueSums = Dots<T, ValueDots>;

// Rows of queries and weights that lie side by side, four codes each; 0: rows of queries interleaved, those of weights one after the other
template <typename T, int R>
constexpr int64_t kBeside = 0;
template <int R>
constexpr int64_t kBeside<int8_t, R> = ValueDots::beside(R);

// Queries or weights [count] of floats in place as sums take them (int8's are made otherwise); returns what the sums are to be multiplied by.
template <typename T>
inline float prepare(float *, int64_t, T) {
    return 1.0f;
}

inline float prepare(float *, int64_t, Fp8) { return kFp8; }

inline float prepare(float *x, int64_t count, Bf16) {
    pack_row<2>(x, count, [](const Lanes &v, void *to) { Lanes::to_bf16(v, to); });
    return 1.0f;
}

// Rows go over several tiles of keys, or of columns of values, at once, where registers hold their sums (kSums): a sum waits for itself.
constexpr int together(int rows) { return kSums >= 4 * rows ? 4 : kSums >= 2 * rows ? 2 : 1; }

// Rows [R][count] -> [count][R]
template <int R>
inline void interleave(const float *rows, int64_t stride, int64_t count, float *to) {
    for (int64_t i = 0; i < count; ++i)
        for (int r = 0; r < R; ++r) to[i * R + r] = rows[r * stride + i];
}

// score_rows for N tiles of 16 keys, the first of them k
template <typename T, int R, int N>
inline void score_tiles(const Attention &a, const float *query, const int32_t *starts, const int64_t *position, const Rows<T> (&at)[N], int64_t k, float *scores, int64_t stride) {
    constexpr int64_t codes = KeySums<T>::kCodes, wide = kBeside<T, R> ? kBeside<T, R> : R;
    KeySums<T> sums[N][R];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[n][r] = KeySums<T>::from(starts[r]);
    for (int64_t i = 0; i < a.cache.head_dim; i += codes, query += wide)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const auto columns = KeySums<T>::key(at[n].keys + i * 16);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) sums[n][r].add(columns, query[r]);
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
        Lanes scale = Lanes::set(score_scale(a));
        if (a.cache.scaled) scale = Lanes::mul(scale, Lanes::load(at[n].key_scales));
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) Lanes::mul(sums[n][r].get(), scale).store(scores + r * stride + n * 16);
    }
    if (!all_seen(a, position[0], position[R - 1], k, N * 16))
        for (int n = 0; n < N; ++n)
            for (int r = 0; r < R; ++r) {
                float *s = scores + r * stride + n * 16;
                seen(a, position[r], k + n * 16, Lanes::load(s), -__builtin_inff()).store(s);
            }
}

// scores [R][stride] of the keys [first, last + 16) for R prepared query rows, interleaved or side by side, in units of theirs; what a row may not see becomes -infinity
template <typename T, int R>
[[gnu::noinline]] void score_rows(const Attention &a, const AttentionPiece &p, const float *query, const int32_t *starts, const int64_t *position, int64_t first, int64_t last, bool cold, float *scores,
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
        score_tiles<T, R, N>(a, query, starts, position, at, k, scores + (k - first), stride);
    }
    for (; k <= last; k += 16) {
        const Rows<T> at[1] = {take()};
        score_tiles<T, R, 1>(a, query, starts, position, at, k, scores + (k - first), stride);
    }
}

// Positions whose sums stand alone: in int8, those with one unit
template <typename T>
constexpr int64_t kSpanOf = std::is_same_v<T, int8_t> ? kSpan : INT64_MAX / 2;

// mix_values for N times 16 columns, the first of them i
template <typename T, int R, int N>
inline void mix_columns(const Attention &a, const AttentionPiece &p, const float *weights, int64_t stride, const float *units, const float *factor, int64_t first, int64_t last, int64_t i,
                        float *const *out) {
    constexpr int64_t n = kTogether<T>, codes = ValueSums<T>::kCodes, beside = kBeside<T, R>;
    const int64_t d = a.cache.head_dim, wide = a.cache.value_dim();
    Lanes total[N][R];
    Tiles<T> tiles(a, p, first);
    int64_t k = first;
    const float *w[beside ? 1 : R];
    for (int r = 0; r < (beside ? 1 : R); ++r) w[r] = weights + r * stride;
    const auto span = [&](const auto &put) __attribute__((always_inline)) {
        const int64_t end = std::min((k / kSpanOf<T> + 1) * kSpanOf<T>, last + 16);
        ValueSums<T> sums[N][R];
        for (; k < end; k += 16, tiles.next()) {
            const T *values = tiles.rows().values + i * n;
#pragma GCC unroll 4
            for (int64_t j = 0; j < 16 / codes; ++j, values += wide * codes) {
                typename ValueSums<T>::Columns columns[N];
#pragma GCC unroll 4
                for (int m = 0; m < N; ++m) columns[m] = ValueSums<T>::value(values + m * 16 * n, wide * n);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int m = 0; m < N; ++m) sums[m][r].add(columns[m], beside ? w[0][j * beside + r] : w[r][j]);
            }
            if constexpr (beside) w[0] += 16 / codes * beside;
            else
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) w[r] += 16 / codes;
        }
#pragma GCC unroll 4
        for (int m = 0; m < N; ++m)
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) put(total[m][r], sums[m][r].get(), Lanes::set(units[r]));
        units += R;
    };
    span([](Lanes &to, const Lanes &sum, const Lanes &unit) { to = Lanes::fma(sum, unit, Lanes::set(0.0f)); });  // never -0, which hidden positions of a later tile would make +0
    while (k <= last) span([](Lanes &to, const Lanes &sum, const Lanes &unit) { to = Lanes::fma(sum, unit, to); });
#pragma GCC unroll 4
    for (int m = 0; m < N; ++m, i += 16)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const Lanes v = Lanes::mul(total[m][r], Lanes::set(factor[r]));
            if (i + kLanes <= d) {
                v.store(out[r] + i);
                continue;
            }
            float last[kLanes];
            v.store(last);
            for (int64_t j = 0; i + j < d; ++j) out[r][i + j] = last[j];
        }
}

// out[r] = prepared weights [R][stride], or side by side, x values, times units [spans][R], times factor[r]
template <typename T, int R>
[[gnu::noinline]] void mix_values(const Attention &a, const AttentionPiece &p, const float *weights, int64_t stride, const float *units, const float *factor, int64_t first, int64_t last, float *const *out) {
    constexpr int N = together(R);
    int64_t i = 0;
    for (; i + 16 * (N - 1) < a.cache.head_dim; i += 16 * N) mix_columns<T, R, N>(a, p, weights, stride, units, factor, first, last, i, out);
    for (; i < a.cache.head_dim; i += 16) mix_columns<T, R, 1>(a, p, weights, stride, units, factor, first, last, i, out);
}

// Scores [R][stride] of rows with `unit` each -> prepared weights, which it returns, their units [spans][R], and what their sums are to be multiplied by
template <typename T, int R>
const float *soften(const Attention &a, const AttentionPiece &p, const int64_t *position, const float *unit, int64_t first, int64_t last, float *scores, int64_t stride, float *units, float *factor) {
    if constexpr (std::is_same_v<T, int8_t>) {
        constexpr int64_t beside = kBeside<T, R>;
        float *weights = beside ? scores + R * stride : scores;
        soften_codes<R>(a, p, R, position, unit, first, last, scores, stride, units, factor, [&](const float *span, const float *inverse, int64_t k, int64_t tiles) {
            if constexpr (beside) {
                ValueSums<T>::template pack<R>(span, stride, inverse, tiles, weights + (k - first) / ValueDots::kCodes * beside);
            } else {
                for (int r = 0; r < R; ++r)
                    for (int64_t i = 0; i < 16 * tiles; i += 16)
                        ValueSums<T>::pack(Lanes::mul(Lanes::load(span + r * stride + i), Lanes::set(inverse[r])), weights + r * stride + (k - first + i) / ValueDots::kCodes);
            }
        });
        return weights;
    } else {
        for (int r = 0; r < R; ++r) {
            float *s = scores + r * stride;
            factor[r] = soften_row(s, stride, unit[r]);
            if (a.cache.scaled) scale_weights<T>(a, p, position[r], s, first, last);
            factor[r] *= prepare(s, stride, T{}) * a.cache.value_scale;
            units[r] = 1.0f;
        }
        return scores;
    }
}

// Queries of R rows, row r's at x[r] -> side by side, their units, and what sums begin with
template <typename Sums, int R>
inline void take_codes(const float *const *x, int64_t d, float *room, float *query, float *unit, int32_t *starts) {
    static_assert(R <= kLanes && Sums::beside(R) == kBeside<int8_t, R>);
    const float *row[R];
    Lanes magnitude[R];
    float largest[kLanes] = {}, inverse[kLanes], units[kLanes];
    for (int r = 0; r < R; ++r) {
        row[r] = x[r];
        if (d % kLanes) {  // whole tiles, zeros at the end
            row[r] = std::copy_n(x[r], d, room) - d;
            room = std::fill_n(room + d, whole_tiles(d) - d, 0.0f);
        }
        magnitude[r] = magnitudes(x[r], d);
    }
    Lanes::largest_or_nan(magnitude, R, largest);
    units_of(largest, 127.0f, inverse, units);
    for (int r = 0; r < R; ++r) unit[r] = unit_of_query(units[r]);
    Sums::template pack<R>([&](int r) { return row[r]; }, inverse, whole_tiles(d) / kLanes, query, starts);
}

// R rows: row numbers count positions of the piece, and within each the heads of the group
template <typename T, int R>
void attend_rows(const Attention &a, const AttentionPiece &p, int64_t row, float *scratch) {
    const int64_t d = a.cache.head_dim, group = a.heads / a.cache.kv_heads;
    const auto query_of = [&](int64_t r) { return a.qkv + (p.query + r / group) * a.row_stride() + (p.kv_head * group + r % group) * d; };
    float *room = scratch, *query = room + kMostQueryRows * whole_tiles(d), *units = query + kMostQueryRows * whole_tiles(d), *out[R], unit[R], factor[R];
    const float *x[R];
    int64_t position[R];
    int32_t starts[R] = {};
    for (int r = 0; r < R; ++r) {
        const int64_t token = p.query + (row + r) / group;
        x[r] = query_of(row + r);
        position[r] = a.positions[token];
        out[r] = a.out + (token * a.heads + p.kv_head * group + (row + r) % group) * d;
    }
    for (int64_t r = row + R; r < std::min(row + 2 * R, (p.query_end - p.query) * group); ++r)
        for (int64_t i = 0; i < d; i += 16) __builtin_prefetch(query_of(r) + i);
    const int64_t last = position[R - 1] / 16 * 16, oldest = oldest_seen(a, position[0]);
    const int64_t first = oldest > 0 ? oldest / 16 * 16 : 0, stride = last - first + 16, codes = KeySums<T>::kCodes;
    float *scores = units + R * (stride / kSpan + 2);
    if constexpr (kBeside<T, R> != 0) {
        take_codes<KeySums<T>, R>(x, d, room, query, unit, starts);
    } else {
        for (int r = 0; r < R; ++r) std::copy_n(x[r], d, room + r * d);
        if constexpr (std::is_same_v<T, int8_t>) query_codes<4 / KeySums<T>::kCodes, R>(room, R, d, KeySums<T>::pack, unit);
        else
            for (int r = 0; r < R; ++r) unit[r] = prepare(room + r * d, d, T{});
        interleave<R>(room, d, (d + codes - 1) / codes, query);
    }
    score_rows<T, R>(a, p, query, starts, position, first, last, row == 0, scores, stride);
    const float *weights = soften<T, R>(a, p, position, unit, first, last, scores, stride, units, factor);
    mix_values<T, R>(a, p, weights, stride, units, factor, first, last, out);
}

// Bytes are multiplied so fast that what brings them, and makes fours of pairs, counts.
template <typename T>
constexpr int kRows = std::is_same_v<T, int8_t> && kSums >= kMostQueryRows ? kMostQueryRows : kQueryRows;

template <typename T>
void attend_piece(const Attention &a, const AttentionPiece &p, float *scratch) {
    const int64_t rows = (p.query_end - p.query) * (a.heads / a.cache.kv_heads);
    int64_t row = 0;
    if constexpr (kRows<T> > kQueryRows)
        for (; row + kRows<T> <= rows; row += kRows<T>) attend_rows<T, kRows<T>>(a, p, row, scratch);
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
