// Products in bf16 with fp32 sums, of fp32 matrices: twice the rate of fp32 on CPUs with AVX512-BF16. Every sum of these loops has one fixed order, whatever the number of threads.
#pragma once

#include <cstdint>

#include "qforge/pool.h"

namespace qforge {

// Whether this CPU can run them.
bool has_bf16_products();

// Whether it multiplies tiles of bf16 (AMX), which a library does several times faster than these.
bool has_bf16_tiles();

constexpr int64_t kTile = 32;

// into[i, j] += sum over tokens of left[t, i] * right[t, j], both rounded to bf16; left, right: [tokens, their width] fp32; into: [left_width, right_width] fp32. With `lower` only for i >= j, and for
// what shares a tile of kTile x kTile with such an element.
void add_products(Pool &pool, const float *left, const float *right, int64_t tokens, int64_t left_width, int64_t right_width, bool lower, float *into);

// y[t, o] = sum over inputs of x[t, i] * weight[o, i], both rounded to bf16; x: [tokens, inputs] fp32; weight: [outputs, inputs] fp32; y: [tokens, outputs] fp32.
void multiply(Pool &pool, const float *x, int64_t tokens, int64_t inputs, const float *weight, int64_t outputs, float *y);

}  // namespace qforge
