// What both products of 4-bit weights share. Macros: KIND (primitives.h); SCALE, the type of scales: 0 fp16, 1 bf16, 2 fp32; ZEROS, whether there are zero points; GROUP, inputs
// that share a scale, 0 for a whole row; RUNS, how many scales 128 inputs have, 1 or 2, 4, 8. Weights: qforge/ops/triton/w4_pack.py.
#pragma once
#include <primitives.h>

#define STEP 128  // inputs
#if SCALE == 2
typedef float scale_t;
INLINE float scale_of(float s) { return s; }
#else
typedef u16 scale_t;
INLINE float scale_of(u16 s) { return float_of(s, SCALE); }
#endif

// The group of a step's run of inputs.
INLINE int group_of(int step, int run) { return GROUP ? (step * STEP + run * (STEP / RUNS)) / (GROUP ? GROUP : 1) : 0; }
