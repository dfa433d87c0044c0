// The functions of layers.h in plain C++, for any CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "qforge/half.h"
#include "qforge/layers.h"

namespace qforge {
namespace {

struct Lanes {
    float v[16];
    template <typename F>
    static Lanes each(F f) {
        Lanes y;
        for (int i = 0; i < 16; ++i) y.v[i] = f(i);
        return y;
    }
    static Lanes load(const float *p) { return each([&](int i) { return p[i]; }); }
    static Lanes load(const uint16_t *p) { return each([&](int i) { return half_to_float(p[i]); }); }
    static Lanes load(const Fp8 *p) {
        return each([&](int i) { return half_to_float(static_cast<uint16_t>((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7 | ((p[i].bits & 0x7f) == 0x7f ? 0x4000 : 0))); });
    }
    static Lanes set(float x) { return each([&](int) { return x; }); }
    static Lanes fma(const Lanes &a, const Lanes &b, const Lanes &c) { return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
    static Lanes add(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
    static Lanes sub(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
    static Lanes mul(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
    static Lanes guess_reciprocal(const Lanes &x) { return each([&](int i) { return __builtin_bit_cast(float, kReciprocal - __builtin_bit_cast(int32_t, x.v[i])); }); }
    static Lanes max(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    static Lanes min(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    static Lanes max_or_nan(const Lanes &a, const Lanes &b) { return each([&](int i) { return __builtin_bit_cast(uint32_t, a.v[i]) > __builtin_bit_cast(uint32_t, b.v[i]) ? a.v[i] : b.v[i]; }); }
    Lanes magnitude() const { return each([&](int i) { return std::fabs(v[i]); }); }
    static Lanes round(const Lanes &a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
    static Lanes div(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
    static Lanes exp_scale(const Lanes &x, const Lanes &p, const Lanes &n) {
        return each([&](int i) {
            if (x.v[i] <= -126.0f) return 0.0f;
            uint32_t bits;
            std::memcpy(&bits, &p.v[i], 4);
            bits += static_cast<uint32_t>(nearest(n.v[i])) << 23;
            float y;
            std::memcpy(&y, &bits, 4);
            return y;
        });
    }
    static Lanes zero_below(const Lanes &x, const Lanes &limit, const Lanes &y) { return each([&](int i) { return x.v[i] <= limit.v[i] ? 0.0f : y.v[i]; }); }
    static void to_bf16(const Lanes &x, void *to) {
        uint16_t halves[16];
        for (int i = 0; i < 16; ++i) {
            const uint32_t bits = __builtin_bit_cast(uint32_t, x.v[i]);
            halves[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
        std::memcpy(to, halves, sizeof halves);
    }
    static void to_bytes(const Lanes &x, void *to) {
        int8_t codes[16];
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<int8_t>(nearest(x.v[i]));
        std::memcpy(to, codes, sizeof codes);
    }
    static void to_int16(const Lanes &x, void *to) {
        int16_t codes[16];
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<int16_t>(nearest(x.v[i]));
        std::memcpy(to, codes, sizeof codes);
    }
    static int32_t nearest(float x) { return x > -1e9f && x < 1e9f ? static_cast<int32_t>(std::nearbyint(x)) : 0; }  // of what is no number, too, which the unit then says
    float sum() const {
        float h[8];
        for (int i = 0; i < 8; ++i) h[i] = v[i] + v[i + 8];
        return ((h[0] + h[1]) + (h[2] + h[3])) + ((h[4] + h[5]) + (h[6] + h[7]));
    }
    static void largest_or_nan(const Lanes *x, int64_t count, float *to) {
        for (int64_t i = 0; i < count; ++i) {
            to[i] = x[i].v[0];
            for (float y : x[i].v) to[i] = __builtin_bit_cast(uint32_t, y) > __builtin_bit_cast(uint32_t, to[i]) ? y : to[i];
        }
    }
    Lanes within(int64_t first, int64_t last, float other) const { return each([&](int i) { return i >= first && i <= last ? v[i] : other; }); }
    float largest() const {
        float most = v[0];
        for (float x : v) most = x > most ? x : most;
        return most;
    }
    void store(float *p) const {
        for (int i = 0; i < 16; ++i) p[i] = v[i];
    }
};

inline uint16_t to_half(float x) { return half_from_float(x); }

// two numbers of 16 bits that lie in a float
template <typename T>
struct Pair {
    T first, second;
};

struct IntegerDots {
    static constexpr int64_t kCodes = 2;
    static constexpr int64_t beside(int) { return 0; }  // codes of weights take the place of the weights
    static constexpr auto pack = [](const Lanes &x, void *to) { Lanes::to_int16(x, to); };
    static IntegerDots from(int32_t) { return {}; }
    static auto key(const int8_t *p) { return load(p); }
    static auto value(const int8_t *p, int64_t) { return load(p); }
    using Columns = const int8_t *;
    int32_t v[16] = {};
    static Columns load(const int8_t *p) { return p; }
    void add(Columns c, float pair) {
        const auto x = __builtin_bit_cast(Pair<int16_t>, pair);
        for (int i = 0; i < 16; ++i) v[i] += x.first * c[2 * i] + x.second * c[2 * i + 1];
    }
    Lanes get() const {
        return Lanes::each([&](int i) { return static_cast<float>(v[i]); });
    }
};

using KeyDots = IntegerDots;
using ValueDots = IntegerDots;

struct Bf16Dots {
    static constexpr int64_t kCodes = 2;
    using Columns = const Bf16 *;
    float v[16] = {};
    static Bf16Dots from(int32_t) { return {}; }
    static Columns key(const Bf16 *p) { return p; }
    static Columns value(const Bf16 *p, int64_t) { return p; }
    static float wide(Bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
    void add(Columns c, float pair) {
        const auto x = __builtin_bit_cast(Pair<Bf16>, pair);
        for (int i = 0; i < 16; ++i) v[i] = __builtin_fmaf(wide(x.first), wide(c[2 * i]), __builtin_fmaf(wide(x.second), wide(c[2 * i + 1]), v[i]));
    }
    Lanes get() const { return Lanes::load(v); }
};

inline void put_every_second(const int8_t *codes, int64_t count, int8_t *to, int64_t odd) {
    for (int64_t i = 0; i < count; ++i) to[2 * i + odd] = codes[i];
}

constexpr int kSums = 6;

#include "layers.inl"

}  // namespace

constinit const LayerFunctions layers_portable{norm, residual, gate, rotate_and_store, clear_after, attend};

}  // namespace qforge
