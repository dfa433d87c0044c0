// As qforge/ops/cuda/source.py generates it: what a warp adds to its 16 rows of the sums. It happens when its group is waited for.
#pragma once

inline void wgmma(float* c, const u32* a, u64 b, int add) {
  const auto* all = exchanged({a[0], a[1], a[2], a[3]});
  const int g = self->index.x % 32 / 4, t = self->index.x % 4;
  std::vector<float> rows(32);
  for (int i = 0; i < 32; i++) rows[i] = first_operand(all, g + i / 16 * 8, i % 16);
  Block* block = self->block;
  open_group().push_back([=] {
    for (int i = 0; i < ROWS / 2; i++) {
      double sum = add ? c[i] : 0.;
      for (int k = 0; k < 16; k++) {
        u16 value;
        std::memcpy(&value, at(*block, swizzled((u32)b + (i / 4 * 8 + t * 2 + i % 2) * 128 + k * 2), 2), 2);
        sum += (double)rows[i / 2 % 2 * 16 + k] * float_of(value, KIND);
      }
      c[i] = (float)sum;
    }
  });
}
