// Halves and floats in plain C++. `static`, since an inline function shared between files with different flags may be linked in the wrong version.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace qforge {

[[maybe_unused]] static float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 0) {
        const float v = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -v : v;
    }
    const uint32_t bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// The nearest half, ties to even; |x| at most 65504, or NaN
[[maybe_unused]] static uint16_t half_from_float(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float magnitude = std::fabs(x);
    if (std::isnan(x)) return sign | 0x7E00;
    if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));  // subnormal: a multiple of 2^-24
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    const uint32_t rest = bits & 0x1FFF, kept = bits >> 13;
    return sign | static_cast<uint16_t>(kept - (112u << 10) + (rest > 0x1000 || (rest == 0x1000 && (kept & 1))));
}

}  // namespace qforge
