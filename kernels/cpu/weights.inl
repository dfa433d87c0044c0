// The weights of a distribution over tokens (sampler.h), once for each instruction set: compiled without joined multiplications and additions, so that sums have the same bits.
#include <algorithm>
#include <bit>

#include "qforge/sampler.h"

namespace qforge {
namespace {

constexpr double kLeast = -700;  // e to that is not denormal yet
constexpr int64_t kTogether = 64;

// e^x for x <= 0 (at least e^kLeast), 1 for 0, to about 1e-15 of it: 2^n times the Taylor series of what is left, whose argument is at most ln(2) / 2. No call, no branch: loops of it become vectors.
inline double power(double x) {
    constexpr double shift = 0x1.8p52, inverse = 0x1.71547652b82fep0, high = 0x1.62e42feep-1, low = 0x1.a39ef35793c76p-33;
    x = x > kLeast ? x : kLeast;
    const double rounded = x * inverse + shift, n = rounded - shift, r = (x - n * high) - n * low;
    double p = 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(rounded) << 52));
}

double sum_of_weights(const float *logits, int64_t n, double largest, double inverse) {
    double weights[kTogether], total = 0;
    for (int64_t start = 0; start < n; start += kTogether) {
        const int64_t count = std::min(kTogether, n - start);
        for (int64_t i = 0; i < count; ++i) weights[i] = power((static_cast<double>(logits[start + i]) - largest) * inverse);
        double part[4] = {};
        for (int64_t i = 0; i < count; ++i) part[i & 3] += weights[i];
        total += (part[0] + part[1]) + (part[2] + part[3]);
    }
    return total;
}

}  // namespace
}  // namespace qforge
