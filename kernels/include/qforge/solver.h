// Native loops of the quantization methods. Every output element is computed in one fixed order, without fused multiply-add, so results are
// equal bit for bit for any number of threads and on every instruction set.
#pragma once

#include <cstdint>

#include "qforge/pool.h"

namespace qforge {

// An integer grid: codes low..high, value = (code - zero) * scale.
struct Grid {
    const float *scales;     // [C, O]: of each group, for every output row
    const uint8_t *zeros;    // [C, O], or null for zero points of 0
    const int32_t *group;    // [I]: group of each column, in the order in which columns are solved
    float low, high;
};

// GPTQ (arXiv 2210.17323) with columns in the order given. For column k:
//   w_k -= sum over j < k of e_j * lower[k, j];   code = nearest to w_k;   e_k = (w_k - value) / lower[k, k]
// lower: [I, I], the transposed upper Cholesky factor of the inverse Hessian. weight: [I, O], a column of the layer is a row here.
// codes: [I, O] bytes (int8 or uint8, as low and high say).
void gptq_solve(Pool &pool, const float *lower, const float *weight, const Grid &grid, int64_t in_features, int64_t out_features, int8_t *codes);

// Coordinate descent on tr((W - Q) H (W - Q)^T) over the codes, scales fixed: every code in turn becomes the best one given all others of its row, `sweeps` times or until
// none changes. hessian: [I, I], symmetric; gradient: [O, I], (W - Q) H, kept up to date; codes: [O, I] bytes; grid.group: group of each column; zero points do not matter. Columns with H_jj <= 0 stay.
void refine_codes(Pool &pool, const float *hessian, const Grid &grid, int64_t in_features, int64_t out_features, int sweeps, float *gradient, int8_t *codes);

// The same descent where the outputs are weighed against each other, tr(G (W - Q) H (W - Q)^T), over all codes of a few inputs, once: input by input, output by output.
// outputs: G [O, O], symmetric, with a positive diagonal; hessian: the part [n, n] of H of these inputs; gradient: their columns of G (W - Q) H as rows, [n, O], kept up to date for
// the inputs still to come; codes: [n, O] bytes; grid.group: group of each of the n inputs. Inputs with H_jj <= 0 stay.
void refine_columns(const float *outputs, const float *hessian, const Grid &grid, int64_t inputs, int64_t out_features, float *gradient, int8_t *codes);

// And over the scales of one group of n inputs, output by output, codes fixed; a scale moves by a quarter at most. gradient, steps (codes less zero points): [O, n]; scales: [O], in place.
void refine_group_scales(const float *outputs, const float *hessian, const float *steps, int64_t inputs, int64_t out_features, float *gradient, float *scales);

// For each group of `size` inputs of each row, the candidate scale with the smallest squared rounding error, each input's error weighted; the first wins a tie.
// weight: [O, C * size]; importance: [C * size]; scales: [K, O, C]; zeros: the same as bytes, or null; best: [O, C].
void best_scale(Pool &pool, const float *weight, const float *importance, const float *scales, const uint8_t *zeros, float low, float high, int64_t candidates,
                int64_t rows, int64_t groups, int64_t size, int32_t *best);

}  // namespace qforge
