// y = x w^T + bias for many rows of x, at the speed of the tensor cores.
//
// Letters: M rows of x, N outputs, K inputs, S parts of K. x [M, K] and y [M, N] of KIND, words [K / 128, N, 16], scales [groups, N], zeros [groups, N], bias [N] fp32 or null.
// N and K are multiples of 8. Grid: (tiles of 128 outputs, tiles of ROWS rows, S); the S blocks of a tile are a cluster.
// Macros besides w4_common.h's: ROWS; STAGES of x in shared memory, 128 inputs each; OWN, whether a warp of its own brings them; THREADS.
// Weights are the first operand of wgmma, 64 outputs of each four warps: they go from memory into the registers where they are multiplied and are unpacked there, half a step
// while the other half is being multiplied. x comes by the copy engine.
// Roundings: weights (codes times scales) to KIND, fp32 sums, the result.
#include <w4_common.h>
#include <wgmma.h>

#define WORKERS 256
#define OUTPUTS 128
#define STAGE (ROWS * STEP * 2)
#define PITCH (OUTPUTS + 4)

struct Words {
  uint2 words[2][2];  // of a step: of rows g and g + 8, pairs t and t + 4
  scale_t scales[2][RUNS];
  u8 zeros[2][RUNS];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
w4_many(const __grid_constant__ TensorMap x, const uint2* __restrict__ words, const scale_t* __restrict__ scales, const u8* __restrict__ zeros, const float* __restrict__ bias,
        u16* __restrict__ y, int m, int n, int all_steps, int part_steps) {
  SHARED_MEMORY(memory, 1024);  // STAGES of x, two panels of 64 inputs each; at the end sums [ROWS, PITCH]
  SHARED_WORDS(barriers, 2 * STAGES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = blockIdx.z, parts = gridDim.z, first = part * part_steps, steps = min(part_steps, all_steps - first);
  const int output0 = blockIdx.x * OUTPUTS, row0 = blockIdx.y * ROWS;
  const u32 shared = (address(memory) + 1023) & ~1023u, full = address(barriers), empty = full + 8 * STAGES;

  auto bring = [&](int step, int stage) {
    const u32 to = shared + stage * STAGE, there = full + 8 * stage;
    arrive_with(there, STAGE);
    bring_box(to, &x, (first + step) * STEP, row0, there);
    bring_box(to + STAGE / 2, &x, (first + step) * STEP + STEP / 2, row0, there);
  };
  if (threadIdx.x == (OWN ? WORKERS : 0)) {
    for (int s = 0; s < STAGES; s++) {
      barrier_begins(full + 8 * s, 1);
      barrier_begins(empty + 8 * s, WORKERS / 32);
    }
    barriers_are_there();
  }
  threads_meet(0, THREADS);
  if (OWN && threadIdx.x >= WORKERS) {
#if ROWS > 160  // so many sums that they need registers of those who have no use for them
    give_registers<24>();
#endif
    if (threadIdx.x == WORKERS) {
      int stage = 0, phase = 1;
      for (int s = 0; s < steps; s++) {
        if (s >= STAGES) wait_for(empty + 8 * stage, phase);
        bring(s, stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
      }
    }
    return;
  }
#if ROWS > 160
  take_registers<240>();
#endif
  if (!OWN && threadIdx.x == 0)
    for (int s = 0; s < STAGES - 2 && s < steps; s++) bring(s, s);

  const int output[2] = {min(output0 + warp * 16 + g, n - 1), min(output0 + warp * 16 + g + 8, n - 1)};
  auto fetch = [&](Words& w, int step) {  // beyond the end the last step again: a condition would have the compiler wait for what is fetched
    const int s = first + min(step, steps - 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint2* at = words + ((size_t)s * n + output[h]) * 8 + t;
      w.words[h][0] = load_once8(at);
      w.words[h][1] = load_once8(at + 4);
#pragma unroll
      for (int r = 0; r < RUNS; r++) {
        const size_t of_group = (size_t)group_of(s, r) * n + output[h];
        w.scales[h][r] = scales[of_group];
        if (ZEROS) w.zeros[h][r] = zeros[of_group];
      }
    }
  };
  auto unpack = [&](u32 (&to)[4][4], const Words& w, int half) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = half * 4 + i, run = j * RUNS / 8;
        const u32 scale = rounded(scale_of(w.scales[h][run])) * 0x10001u, zero = minus(ZEROS ? w.zeros[h][run] : 8);
        to[i][h] = scaled_codes(half ? w.words[h][0].y : w.words[h][0].x, i, zero, scale);
        to[i][2 + h] = scaled_codes(half ? w.words[h][1].y : w.words[h][1].x, i, zero, scale);
      }
  };
  Words ahead[2];
  fetch(ahead[0], 0);
  fetch(ahead[1], 1);
  u32 a[2][4][4];
  float total[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) total[i] = 0.f;  // which wgmma without `add` does not read: unset ones have NVRTC 12.6 let each product wait for the one before
  int stage = 0, phase = 0, stage_before = 0;
  for (int s0 = 0; s0 < steps; s0 += 2) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      const int s = s0 + p;
      if (s >= steps) break;
      if (!OWN) {
        if (threadIdx.x == 0 && s + STAGES - 2 < steps) {  // into the stage of the step before last, which all have multiplied
          const int there = stage < 2 ? stage + STAGES - 2 : stage - 2;
          if (s >= 2) wait_for(empty + 8 * there, stage < 2 ? phase ^ 1 : phase);
          bring(s + STAGES - 2, there);
        }
        warp_meets();
      }
      const Words now = ahead[p];
      fetch(ahead[p], s + 2);
      unpack(a[0], now, 0);
      wait_for(full + 8 * stage, phase);
      products_begin();
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma(total, a[0][j], operand(shared + stage * STAGE + j * 32), s + j > 0);
      products_end();
      products_are_done<1>();
      if (s > 0 && lane == 0) arrive(empty + 8 * stage_before);
      unpack(a[1], now, 1);
      products_begin();
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma(total, a[1][j], operand(shared + stage * STAGE + STAGE / 2 + j * 32), 1);
      products_end();
      products_are_done<1>();
      stage_before = stage;
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }
  products_are_done<0>();

  // Through shared memory, so that outputs of a row lie together; with parts, of all blocks of the cluster, each of which adds some rows, always in the same order.
  threads_meet(1, WORKERS);
  float* sums = (float*)(memory + (shared - address(memory)));
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[(i / 4 * 8 + t * 2 + i % 2) * PITCH + warp * 16 + g + i / 2 % 2 * 8] = total[i];
  threads_meet(1, WORKERS);
  if (parts > 1) cluster_meets();
  const int rows = min(ROWS, m - row0), o = lane * 4;
  if (output0 + o < n) {
    const u32 at = shared + o * 4;
    float4 b = {0.f, 0.f, 0.f, 0.f};
    if (bias) b = *(const float4*)(bias + output0 + o);
#pragma unroll 2
    for (int r = part + parts * warp; r < rows; r += WORKERS / 32 * parts) {
      float4 sum = {0.f, 0.f, 0.f, 0.f};
      for (int q = 0; q < parts; q++) {
        const float4 v = parts > 1 ? load_sums_of(q, at + r * PITCH * 4) : load_sums(at + r * PITCH * 4);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      uint2 out;
      out.x = rounded(sum.x + b.x) | (u32)rounded(sum.y + b.y) << 16;
      out.y = rounded(sum.z + b.z) | (u32)rounded(sum.w + b.w) << 16;
      *(uint2*)(y + (size_t)(row0 + r) * n + output0 + o) = out;
    }
  }
  if (parts > 1) cluster_meets();
}
