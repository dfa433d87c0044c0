// The loops of solver.h, written with the compiler's vector types: AVX2 where the CPU has it, else whatever the target has.
#include "qforge/solver.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define QFORGE_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define QFORGE_CLONES
#endif
#define QFORGE_INLINE inline __attribute__((always_inline))

namespace qforge {
namespace {

constexpr int kLanes = 8;
constexpr int kVectors = 2;
constexpr int kStrip = kLanes * kVectors;  // output rows solved together: their errors stay in L2 (1536 columns: 98 KB)
constexpr int kBlock = 4;                  // columns whose sums over earlier columns are formed together: 8 accumulators
constexpr float kMagic = 12582912.0f;      // 1.5 * 2^23: adding and subtracting it rounds to nearest even, for |x| < 2^22

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

QFORGE_INLINE Vector splat(float x) { return Vector{x, x, x, x, x, x, x, x}; }
QFORGE_INLINE Vector clamp(Vector x, Vector low, Vector high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}
QFORGE_INLINE Vector round_even(Vector x) { return (x + splat(kMagic)) - splat(kMagic); }

struct SolveJob {
    const float *lower, *weight;
    const Grid *grid;
    int64_t in_features, out_features;
    int8_t *codes;
};

QFORGE_CLONES void solve_strip(const SolveJob &job, int64_t first, float *errors) {
    const int64_t n = job.in_features, rows = job.out_features, live = std::min<int64_t>(kStrip, rows - first);
    const Grid &grid = *job.grid;
    float scale[kStrip], zero[kStrip], column[kStrip], code[kStrip];
    int32_t group = -1;
    for (int64_t start = 0; start < n; start += kBlock) {
        const int64_t end = std::min<int64_t>(start + kBlock, n);
        Vector sums[kBlock][kVectors];
        for (int b = 0; b < kBlock; ++b)
            for (int v = 0; v < kVectors; ++v) sums[b][v] = splat(0.0f);
        const float *l[kBlock];
        for (int b = 0; b < kBlock; ++b) l[b] = job.lower + std::min<int64_t>(start + b, n - 1) * n;
        for (int64_t j = 0; j < start; ++j) {
            const Vector *e = reinterpret_cast<const Vector *>(errors + j * kStrip);
            for (int b = 0; b < kBlock; ++b) {
                const Vector factor = splat(l[b][j]);
                for (int v = 0; v < kVectors; ++v) sums[b][v] += e[v] * factor;
            }
        }
        for (int64_t k = start; k < end; ++k) {
            if (grid.group[k] != group) {
                group = grid.group[k];
                for (int r = 0; r < kStrip; ++r) {
                    const int64_t at = group * rows + std::min<int64_t>(first + r, rows - 1);
                    scale[r] = grid.scales[at];
                    zero[r] = grid.zeros ? grid.zeros[at] : 0.0f;
                }
            }
            for (int r = 0; r < kStrip; ++r) column[r] = job.weight[k * rows + std::min<int64_t>(first + r, rows - 1)];
            const float *row = l[k - start];
            const Vector diagonal = splat(row[k]);
            Vector *e = reinterpret_cast<Vector *>(errors + k * kStrip);
            for (int v = 0; v < kVectors; ++v) {
                Vector sum = sums[k - start][v];
                for (int64_t j = start; j < k; ++j) sum += reinterpret_cast<const Vector *>(errors + j * kStrip)[v] * splat(row[j]);
                const Vector w = reinterpret_cast<const Vector *>(column)[v] - sum;
                const Vector s = reinterpret_cast<const Vector *>(scale)[v], z = reinterpret_cast<const Vector *>(zero)[v];
                const Vector steps = round_even(clamp(w / s, splat(grid.low) - z, splat(grid.high) - z));
                reinterpret_cast<Vector *>(code)[v] = steps + z;
                e[v] = (w - steps * s) / diagonal;
            }
            for (int r = 0; r < live; ++r) job.codes[k * rows + first + r] = static_cast<int8_t>(static_cast<int32_t>(code[r]));
        }
    }
}

struct RefineJob {
    const float *hessian;
    const Grid *grid;
    int64_t in_features, out_features;
    int sweeps;
    float *gradient;
    int8_t *codes;
};

QFORGE_INLINE void subtract_scaled(float *into, const float *row, float factor, int64_t n) {
    const Vector f = splat(factor);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) *reinterpret_cast<Vector *>(into + i) -= *reinterpret_cast<const Vector *>(row + i) * f;
    for (; i < n; ++i) into[i] -= row[i] * factor;
}

QFORGE_CLONES void refine_row(const RefineJob &job, int64_t row) {
    const int64_t n = job.in_features;
    const Grid &grid = *job.grid;
    const bool is_signed = grid.low < 0.0f;
    float *gradient = job.gradient + row * n;
    int8_t *codes = job.codes + row * n;
    for (int sweep = 0; sweep < job.sweeps; ++sweep) {
        bool changed = false;
        for (int64_t j = 0; j < n; ++j) {
            const float curvature = job.hessian[j * n + j];
            if (curvature <= 0.0f) continue;
            const float scale = grid.scales[grid.group[j] * job.out_features + row];
            const float code = is_signed ? static_cast<float>(codes[j]) : static_cast<float>(static_cast<uint8_t>(codes[j]));
            const float wanted = std::min(std::max(code + gradient[j] / (curvature * scale), grid.low), grid.high);
            const float best = (wanted + kMagic) - kMagic;
            if (best == code) continue;
            codes[j] = static_cast<int8_t>(static_cast<int32_t>(best));
            subtract_scaled(gradient, job.hessian + j * n, (best - code) * scale, n);
            changed = true;
        }
        if (!changed) break;
    }
}

QFORGE_CLONES void refine_columns_of(const float *outputs, const float *hessian, const Grid &grid, int64_t inputs, int64_t rows, float *gradient, int8_t *codes, float *before) {
    const bool is_signed = grid.low < 0.0f;
    for (int64_t j = 0; j < inputs; ++j) {
        const float curvature = hessian[j * inputs + j];
        if (curvature <= 0.0f) continue;
        const float *scales = grid.scales + grid.group[j] * rows;
        float *column = gradient + j * rows;
        int8_t *code = codes + j * rows;
        std::memcpy(before, column, rows * sizeof(float));
        for (int64_t o = 0; o < rows; ++o) {
            const float old = is_signed ? static_cast<float>(code[o]) : static_cast<float>(static_cast<uint8_t>(code[o]));
            const float wanted = std::min(std::max(old + column[o] / (outputs[o * rows + o] * curvature * scales[o]), grid.low), grid.high);
            const float best = (wanted + kMagic) - kMagic;
            if (best == old) continue;
            code[o] = static_cast<int8_t>(static_cast<int32_t>(best));
            subtract_scaled(column, outputs + o * rows, (best - old) * scales[o] * curvature, rows);
        }
        for (int64_t o = 0; o < rows; ++o) before[o] = (before[o] - column[o]) / curvature;  // G times the column's change
        for (int64_t k = j + 1; k < inputs; ++k) subtract_scaled(gradient + k * rows, before, hessian[j * inputs + k], rows);
    }
}

QFORGE_CLONES void refine_group_scales_of(const float *outputs, const float *hessian, const float *steps, int64_t inputs, int64_t rows, float *gradient, float *scales, float *effect) {
    for (int64_t o = 0; o < rows; ++o) {
        const float *step = steps + o * inputs, *row = gradient + o * inputs;
        std::fill(effect, effect + inputs, 0.0f);  // less what a larger scale does to the inputs' errors, times H
        for (int64_t k = 0; k < inputs; ++k) subtract_scaled(effect, hessian + k * inputs, step[k], inputs);
        float slope = 0.0f, curvature = 0.0f;
        for (int64_t k = 0; k < inputs; ++k) {
            slope += row[k] * step[k];
            curvature -= effect[k] * step[k];
        }
        curvature *= outputs[o * rows + o];
        if (curvature <= 0.0f) continue;
        const float change = std::min(std::max(slope / curvature, scales[o] * -0.25f), scales[o] * 0.25f);
        scales[o] += change;
        for (int64_t r = 0; r < rows; ++r) subtract_scaled(gradient + r * inputs, effect, -change * outputs[o * rows + r], inputs);
    }
}

struct ScaleJob {
    const float *weight, *importance, *scales;
    const uint8_t *zeros;
    float low, high;
    int64_t candidates, rows, groups, size;
    int32_t *best;
};

QFORGE_CLONES void best_of_row(const ScaleJob &job, int64_t row) {
    for (int64_t g = 0; g < job.groups; ++g) {
        const float *w = job.weight + (row * job.groups + g) * job.size, *importance = job.importance + g * job.size;
        float least = 0.0f;
        int32_t winner = 0;
        for (int64_t c = 0; c < job.candidates; ++c) {
            const int64_t at = (c * job.rows + row) * job.groups + g;
            const float scale = job.scales[at], zero = job.zeros ? job.zeros[at] : 0.0f;
            const Vector s = splat(scale), low = splat(job.low - zero), high = splat(job.high - zero);
            Vector total = splat(0.0f);
            int64_t i = 0;
            for (; i + kLanes <= job.size; i += kLanes) {
                const Vector x = *reinterpret_cast<const Vector *>(w + i);
                const Vector error = x - round_even(clamp(x / s, low, high)) * s;
                total += error * error * *reinterpret_cast<const Vector *>(importance + i);
            }
            float sum = ((total[0] + total[4]) + (total[1] + total[5])) + ((total[2] + total[6]) + (total[3] + total[7]));
            for (; i < job.size; ++i) {
                const float step = std::min(std::max(w[i] / scale, job.low - zero), job.high - zero);
                const float error = w[i] - ((step + kMagic) - kMagic) * scale;
                sum += error * error * importance[i];
            }
            if (c == 0 || sum < least) {
                least = sum;
                winner = static_cast<int32_t>(c);
            }
        }
        job.best[row * job.groups + g] = winner;
    }
}

}  // namespace

void gptq_solve(Pool &pool, const float *lower, const float *weight, const Grid &grid, int64_t in_features, int64_t out_features, int8_t *codes) {
    struct Shared {
        SolveJob job;
        std::vector<std::vector<float>> errors;
    } shared{{lower, weight, &grid, in_features, out_features, codes}, std::vector<std::vector<float>>(pool.threads())};
    const int strips = static_cast<int>((out_features + kStrip - 1) / kStrip);
    pool.run(
        strips,
        [](void *context, int strip, int thread) {
            auto *s = static_cast<Shared *>(context);
            s->errors[thread].resize(s->job.in_features * kStrip);
            solve_strip(s->job, static_cast<int64_t>(strip) * kStrip, s->errors[thread].data());
        },
        &shared);
}

void refine_codes(Pool &pool, const float *hessian, const Grid &grid, int64_t in_features, int64_t out_features, int sweeps, float *gradient, int8_t *codes) {
    RefineJob job{hessian, &grid, in_features, out_features, sweeps, gradient, codes};
    pool.run(static_cast<int>(out_features), [](void *context, int row, int) { refine_row(*static_cast<RefineJob *>(context), row); }, &job);
}

void refine_columns(const float *outputs, const float *hessian, const Grid &grid, int64_t inputs, int64_t out_features, float *gradient, int8_t *codes) {
    std::vector<float> before(out_features);
    refine_columns_of(outputs, hessian, grid, inputs, out_features, gradient, codes, before.data());
}

void refine_group_scales(const float *outputs, const float *hessian, const float *steps, int64_t inputs, int64_t out_features, float *gradient, float *scales) {
    std::vector<float> effect(inputs);
    refine_group_scales_of(outputs, hessian, steps, inputs, out_features, gradient, scales, effect.data());
}

void best_scale(Pool &pool, const float *weight, const float *importance, const float *scales, const uint8_t *zeros, float low, float high, int64_t candidates,
                int64_t rows, int64_t groups, int64_t size, int32_t *best) {
    ScaleJob job{weight, importance, scales, zeros, low, high, candidates, rows, groups, size, best};
    pool.run(static_cast<int>(rows), [](void *context, int row, int) { best_of_row(*static_cast<ScaleJob *>(context), row); }, &job);
}

}  // namespace qforge
