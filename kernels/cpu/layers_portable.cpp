// The functions of layers.h in plain C++, for any CPU.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "qforge/half.h"
#include "qforge/layers.h"

namespace qforge {
namespace {

struct Lanes {
    float v[8];
    template <typename F>
    static Lanes each(F f) {
        Lanes y;
        for (int i = 0; i < 8; ++i) y.v[i] = f(i);
        return y;
    }
    static Lanes load(const float *p) { return each([&](int i) { return p[i]; }); }
    static Lanes load(const uint16_t *p) { return each([&](int i) { return half_to_float(p[i]); }); }
    static Lanes load(const int8_t *p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
    static void pairs(const Bf16 *p, Lanes &even, Lanes &odd) {
        even = each([&](int i) { return __builtin_bit_cast(float, static_cast<uint32_t>(p[2 * i].bits) << 16); });
        odd = each([&](int i) { return __builtin_bit_cast(float, static_cast<uint32_t>(p[2 * i + 1].bits) << 16); });
    }
    static Lanes set(float x) { return each([&](int) { return x; }); }
    static Lanes fma(const Lanes &a, const Lanes &b, const Lanes &c) { return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
    static Lanes add(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
    static Lanes mul(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
    static Lanes div(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
    static Lanes max(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    static Lanes min(const Lanes &a, const Lanes &b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    static Lanes round(const Lanes &a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
    static Lanes exp_scale(const Lanes &p, const Lanes &n) {
        return each([&](int i) {
            uint32_t bits;
            std::memcpy(&bits, &p.v[i], 4);
            bits += static_cast<uint32_t>(static_cast<int32_t>(n.v[i])) << 23;
            float y;
            std::memcpy(&y, &bits, 4);
            return y;
        });
    }
    static Lanes keep_above(const Lanes &x, const Lanes &limit, const Lanes &y) { return each([&](int i) { return x.v[i] > limit.v[i] ? y.v[i] : 0.0f; }); }
    void store(float *p) const {
        for (int i = 0; i < 8; ++i) p[i] = v[i];
    }
};

inline uint16_t to_half(float x) { return half_from_float(x); }

#include "layers.inl"

}  // namespace

const LayerFunctions layers_portable{norm, residual, gate, rotate_and_store, attend};

}  // namespace qforge
