// y = x w^T + bias for a few rows of x, at the speed of the memory that weights come from.
//
// Letters: M rows of x (8 at most), N outputs, K inputs. x [M, K] and y [M, N] of KIND, words [K / 128, N, 16], scales [groups, N], zeros [groups, N], bias [N] fp32 or null.
// M, N, K: N at least OUTPUTS; K a multiple of 8.
// Macros besides w4_common.h's: WN x WK warps, each with 32 outputs at a time; those with the same outputs share the inputs, every WK-th step of 128 is one's.
// A block of threads takes every gridDim.x-th tile of outputs, and always has the words of its next two steps under way, also from one tile to the next.
// Scales multiply fp32 sums of a run of inputs: the only roundings are those of fp32 sums and of the result.
#include <w4_common.h>

#define TILES 2  // of 16 outputs a warp
#define OUTPUTS (16 * TILES * WN)
#define THREADS (32 * WN * WK)
#define AHEAD 2
#define PITCH (OUTPUTS + 4)
#define PIECES 4  // threads that add one sum's parts; they divide WK

struct Words {
  uint4 words[TILES][2];  // of a step, of rows g and g + 8: pairs 2 t and 2 t + 1
  scale_t scales[TILES][2][RUNS];
  u8 zeros[TILES][2][RUNS];
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
w4_few(const u16* __restrict__ x, const uint4* __restrict__ words, const scale_t* __restrict__ scales, const u8* __restrict__ zeros, const float* __restrict__ bias,
       u16* __restrict__ y, int m, int n, int k, int steps) {
  SHARED_MEMORY(memory, 16);  // x, rows of 256 steps + 32 bytes (so that four rows lie in other banks); sums [WK, 8, PITCH]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, wn = warp % WN, wk = warp / WN;
  const int tiles = (n + OUTPUTS - 1) / OUTPUTS;
  auto first_of = [&](int tile) { return min(tile * OUTPUTS, n - OUTPUTS); };  // the last tile computes some outputs of the one before again

  // Fetch: words of (next_tile, next_step), then on to the next step, or tile, or the last again.
  Words ahead[AHEAD];
  int next_tile = blockIdx.x, next_step = wk;
  const char* at_words;
  const scale_t* at_scales;
  const u8* at_zeros;
  auto point = [&]() {
    const size_t row = first_of(next_tile) + wn * TILES * 16 + g, of_group = (size_t)group_of(wk, 0) * n + row;
    at_words = (const char*)(words + ((size_t)wk * n + row) * 4 + t);
    at_scales = scales + of_group;
    at_zeros = zeros + of_group;
  };
  auto fetch = [&](Words& w) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = i * 16 + h * 8;
        w.words[i][h] = load_once16(at_words + row * 64);
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
          const size_t at = (size_t)(group_of(next_step, r) - group_of(next_step, 0)) * n + row;
          w.scales[i][h][r] = at_scales[at];
          if (ZEROS) w.zeros[i][h][r] = at_zeros[at];
        }
      }
    const int group = group_of(next_step, 0);
    next_step += WK;
    if (next_step < steps) {
      const size_t further = (size_t)(group_of(next_step, 0) - group) * n;
      at_words += (size_t)WK * n * 64;
      at_scales += further;
      at_zeros += further;
    } else {
      next_step = wk;
      if (next_tile + (int)gridDim.x < tiles) next_tile += gridDim.x;
      point();
    }
  };
  const bool works = wk < steps;
  if (works) {
    point();
#pragma unroll
    for (int p = 0; p < AHEAD; p++) fetch(ahead[p]);
  }

  // Each warp brings what it reads of x itself: nobody waits for another one's.
  const u32 shared = address(memory);
  const int stride = steps * 256 + 32;
  for (int s = wk; s < steps; s += WK)
    for (int c = lane; c < m * 16; c += 32) {
      const int row = c / 16, column = s * STEP + c % 16 * 8, bytes = max(0, min(16, (k - column) * 2));
      copy16(shared + row * stride + column * 2, x + (bytes ? (size_t)row * k + column : 0), bytes);
    }
  const u32 of_x = shared + min(g, m - 1) * stride + t * 8;  // rows beyond the last: that one again, for nobody
  float* sums = (float*)(memory + m * stride);
  float total[TILES][4];
  auto clear = [&](float (&of)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) of[i][e] = 0.f;
  };

  auto compute = [&](const Words& w, int step) {
    float product[TILES][4];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int run = j * RUNS / 8;
      if (j % (8 / RUNS) == 0) clear(product);
      const uint2 b = load8(of_x + step * 256 + j * 32);
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        u32 a[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4 v = w.words[i][h];
          const u32 zero = minus(ZEROS ? w.zeros[i][h][run] : 8);
          a[h] = codes(j < 4 ? v.x : v.y, j % 4, zero);
          a[2 + h] = codes(j < 4 ? v.z : v.w, j % 4, zero);
        }
        mma(product[i], a, b.x, b.y);
      }
      if ((j + 1) % (8 / RUNS) == 0) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) total[i][e] += product[i][e] * scale_of(w.scales[i][e / 2][run]);
      }
    }
  };

  // The sums of warps with the same outputs, always in the same order.
  auto finish = [&](int tile) {
    const int first = first_of(tile);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[(wk * 8 + t * 2 + e % 2) * PITCH + (wn * TILES + i) * 16 + g + e / 2 * 8] = total[i][e];
    clear(total);
    threads_meet(0, THREADS);
    const int at_once = THREADS / PIECES, rounds = (m * OUTPUTS + at_once - 1) / at_once;
    for (int c = threadIdx.x / PIECES; c < rounds * at_once; c += at_once) {
      const int row = min(c / OUTPUTS, m - 1), o = c % OUTPUTS;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WK / PIECES; w++) sum += sums[((w * PIECES + threadIdx.x % PIECES) * 8 + row) * PITCH + o];
#pragma unroll
      for (int d = 1; d < PIECES; d *= 2) sum += of_neighbour(sum, d);
      if (c < m * OUTPUTS && threadIdx.x % PIECES == 0) y[(size_t)row * n + first + o] = rounded(sum + (bias ? bias[first + o] : 0.f));
    }
    threads_meet(0, THREADS);
  };

  clear(total);
  copies_are_there();
  warp_meets();
  int tile = blockIdx.x, step = wk;
  if (!works)
    for (; tile < tiles; tile += gridDim.x) finish(tile);
  while (tile < tiles) {
#pragma unroll
    for (int p = 0; p < AHEAD; p++)
      if (tile < tiles) {
        compute(ahead[p], step);
        fetch(ahead[p]);
        step += WK;
        if (step >= steps) {
          finish(tile);
          step = wk;
          tile += gridDim.x;
        }
      }
  }
}
