// Sums of products of activations, X^T Y over tokens, in bf16 with fp32 sums: twice the rate of fp32 on CPUs with AVX512-BF16.
#pragma once

#include <cstdint>

#include "qforge/pool.h"

namespace qforge {

// Whether this CPU can run add_products.
bool has_bf16_products();

// into[i, j] += sum over tokens of left[t, i] * right[t, j], both rounded to bf16; left, right: [tokens, width] fp32; into: [width, width] fp32. With `lower` only for i >= j, and for what shares a tile of
// kTile x kTile with such an element. Every sum has one fixed order, whatever the number of threads.
constexpr int64_t kTile = 32;
void add_products(Pool &pool, const float *left, const float *right, int64_t tokens, int64_t width, bool lower, float *into);

}  // namespace qforge
