// A kernel of qforge/ops/cuda as a function, which says whether it came to an end: -DW4_FEW or -DW4_MANY, and its own macros.
#ifdef W4_FEW
#include <w4_few.cu>
extern "C" bool run(const u16* x, const uint4* words, const scale_t* scales, const u8* zeros, const float* bias, u16* y, int m, int n, int k, int steps, int grid, int shared) {
  return run_grid({grid, 1, 1}, THREADS, shared, [=] { w4_few(x, words, scales, zeros, bias, y, m, n, k, steps); });
}
#else
#include <w4_many.cu>
extern "C" bool run(const u16* x, const uint2* words, const scale_t* scales, const u8* zeros, const float* bias, u16* y, int m, int n, int k, int steps, int part_steps, int shared) {
  const TensorMap map = {x, m, k, ROWS};
  return run_grid({(n + 127) / 128, (m + ROWS - 1) / ROWS, (steps + part_steps - 1) / part_steps}, THREADS, shared, [=] { w4_many(map, words, scales, zeros, bias, y, m, n, steps, part_steps); });
}
#endif
