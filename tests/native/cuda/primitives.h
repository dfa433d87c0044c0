// What qforge/ops/cuda/primitives.h has, in plain C++: threads of a block are contexts that take turns, whenever one waits for others.
// What a GPU does without waiting is done as late as it may be: copies when somebody waits for them or a random moment before, products when their group is waited for.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };

#define INLINE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct Meeting {  // how many have come, and the how manieth meeting it is
  int come = 0, times = 0;
};
struct Barrier {
  int arrivals = 0, pending = 0, bytes = 0;
  u32 phase = 0;
  void check() {
    if (pending == 0 && bytes == 0) phase ^= 1, pending = arrivals;
  }
};
struct Warp {
  Meeting meeting;
  u32 values[2][32][6];
};
struct Block {
  std::vector<u8> memory;
  std::map<u32, Barrier> barriers;
  std::map<int, Meeting> meetings;
  std::vector<Warp> warps;
  std::deque<std::function<void()>> boxes;  // copies that the engine has still to make
  Index index;
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index index;
  Block* block;
  bool done = false;
  int exchanges = 0;
  std::vector<std::function<void()>> copies;
  std::deque<std::vector<std::function<void()>>> groups;  // of products that are not done
};
inline Thread* self;
inline std::vector<std::unique_ptr<Thread>>* cluster_threads;
inline std::vector<std::unique_ptr<Block>>* cluster_blocks;
inline Meeting cluster_meeting;
inline Index grid_size;
inline ucontext_t scheduler;
#define threadIdx (self->index)
#define blockIdx (self->block->index)
#define gridDim grid_size
constexpr int FIRST = 16;  // where a block's memory begins: not at a multiple of 1024
constexpr size_t STACK = 1 << 17;

inline void turn() { swapcontext(&self->context, &scheduler); }
inline void meet(Meeting& meeting, const std::function<int()>& all) {
  const int times = meeting.times;
  meeting.come++;
  while (meeting.times == times) {
    if (meeting.come >= all()) {
      meeting.come = 0, meeting.times++;
      return;
    }
    turn();
  }
}

inline float float_of(u16 value, int kind) {
  u32 bits;
  if (kind == 1) bits = (u32)value << 16;
  else {
    const u32 sign = (u32)(value & 0x8000) << 16, exponent = value >> 10 & 31, mantissa = value & 1023;
    if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp((float)mantissa, -24);
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline u16 rounded_to(float f, int kind) {  // to the nearest, ties to even
  u32 bits;
  std::memcpy(&bits, &f, 4);
  if (kind == 1) return std::isnan(f) ? 0x7fc0 : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  const u16 sign = bits >> 16 & 0x8000;
  const float a = std::fabs(f);
  if (!(a < 65520.f)) return sign | (std::isnan(f) ? 0x7e00 : 0x7c00);
  if (a < 6.103515625e-05f) return sign | (u16)std::nearbyint(std::ldexp(a, 24));
  bits &= 0x7fffffff;
  return sign | (u16)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}
inline u16 rounded(float f) { return rounded_to(f, KIND); }
inline u32 pair(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
inline float half_of(u32 pair, int which) { return float_of(which ? pair >> 16 : pair & 0xffff, KIND); }

inline uint4 load_once16(const void* from) { uint4 v; std::memcpy(&v, from, 16); return v; }
inline uint2 load_once8(const void* from) { uint2 v; std::memcpy(&v, from, 8); return v; }
inline u32 minus(u32 zero) {
  const float z = -((KIND == 0 ? 1024.f : 128.f) + zero);
  return pair(z, z);
}
inline u32 codes(u32 word, int j, u32 zero) {
  const float magic = KIND == 0 ? 1024.f : 128.f, low = word >> (4 * j) & 15, high = word >> (4 * j + 16) & 15;
  return pair(magic + low + half_of(zero, 0), magic + high + half_of(zero, 1));
}
inline u32 scaled_codes(u32 word, int j, u32 zero, u32 scale) {
  const u32 c = codes(word, j, zero);
  return pair(half_of(c, 0) * half_of(scale, 0), half_of(c, 1) * half_of(scale, 1));
}

inline Warp& warp_of() { return self->block->warps[self->index.x / 32]; }
inline void warp_meets() { meet(warp_of().meeting, [] { return 32; }); }
inline u32 (*exchanged(const std::vector<u32>& mine))[6] {  // what all lanes of the warp have; for until the next but one
  auto& all = warp_of().values[self->exchanges++ % 2];
  for (size_t i = 0; i < mine.size(); i++) all[self->index.x % 32][i] = mine[i];
  warp_meets();
  return all;
}
// Element [row, k] of a first operand of 16 rows, of those that lanes have.
inline float first_operand(const u32 (*all)[6], int row, int k) { return half_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2); }
inline void mma(float* c, const u32* a, u32 b0, u32 b1) {
  const auto* all = exchanged({a[0], a[1], a[2], a[3], b0, b1});
  const int g = self->index.x % 32 / 4, t = self->index.x % 4;
  for (int e = 0; e < 4; e++) {
    double sum = c[e];
    for (int k = 0; k < 16; k++) sum += (double)first_operand(all, g + e / 2 * 8, k) * half_of(all[(t * 2 + e % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
    c[e] = (float)sum;
  }
}
inline float of_neighbour(float value, int distance) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  bits = exchanged({bits})[self->index.x % 32 ^ distance][0];
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void threads_meet(int which, int threads) {
  meet(self->block->meetings[which], [threads] { return threads; });
}

#define SHARED_MEMORY(name, alignment) unsigned char* name = self->block->memory.data() + FIRST
#define SHARED_WORDS(name, count) u64* name = (u64*)(self->block->memory.data() + self->block->memory.size() - 8 * (count))
inline u32 address(const void* shared) { return (u32)((const u8*)shared - self->block->memory.data()); }
inline u8* at(Block& block, u32 address, size_t bytes) {
  if (address + bytes > block.memory.size()) std::abort();
  return block.memory.data() + address;
}
inline uint2 load8(u32 from) { uint2 v; std::memcpy(&v, at(*self->block, from, 8), 8); return v; }
inline float4 load_sums(u32 from) { float4 v; std::memcpy(&v, at(*self->block, from, 16), 16); return v; }
inline float4 load_sums_of(int block, u32 from) { float4 v; std::memcpy(&v, at(*(*cluster_blocks)[block], from, 16), 16); return v; }
inline void copy16(u32 to, const void* from, int bytes) {
  u8* there = at(*self->block, to, 16);
  self->copies.push_back([=] {
    std::memset(there, 0, 16);
    std::memcpy(there, from, bytes);
  });
}
inline void copies_are_there() {
  for (auto& copy : self->copies) copy();
  self->copies.clear();
}

inline void barrier_begins(u32 at, int arrivals) { self->block->barriers[at] = {arrivals, arrivals, 0, 0}; }
inline void barriers_are_there() {}
inline void arrive(u32 at) {
  Barrier& b = self->block->barriers.at(at);
  b.pending--;
  b.check();
}
inline void arrive_with(u32 at, int bytes) {
  self->block->barriers.at(at).bytes += bytes;
  arrive(at);
}
inline void wait_for(u32 at, u32 phase) {
  while (self->block->barriers.at(at).phase == phase) turn();
}
struct TensorMap {  // `box` rows of 64 numbers of a tensor [rows, columns]
  const u16* data;
  int64_t rows, columns, box;
};
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline void bring_box(u32 to, const TensorMap* tensor, int column, int row, u32 barrier) {
  Block* block = self->block;
  const TensorMap map = *tensor;
  block->boxes.push_back([=] {
    for (int r = 0; r < map.box; r++)
      for (int c = 0; c < 64; c++) {
        const bool inside = row + r < map.rows && column + c < map.columns;
        const u16 value = inside ? map.data[(row + r) * map.columns + column + c] : 0;
        std::memcpy(at(*block, swizzled(to + r * 128 + c * 2), 2), &value, 2);
      }
    Barrier& b = block->barriers.at(barrier);
    b.bytes -= (int)map.box * 128;
    b.check();
  });
}
inline u64 operand(u32 at) { return at; }
inline void products_begin() {}
inline std::vector<std::function<void()>>& open_group() {
  if (self->groups.empty()) self->groups.emplace_back();
  return self->groups.back();
}
inline void products_end() { self->groups.emplace_back(); }
template <int PENDING> inline void products_are_done() {
  while ((int)self->groups.size() - 1 > PENDING) {
    for (auto& product : self->groups.front()) product();
    self->groups.pop_front();
  }
}
template <int> inline void give_registers() {}
template <int> inline void take_registers() {}
inline void cluster_meets() {
  meet(cluster_meeting, [] {
    int alive = 0;
    for (auto& t : *cluster_threads) alive += !t->done;
    return alive;
  });
}

// Half of the warps rest while the others go on, every now and then others.
inline bool sleeps(u32 warp, u64 round) {
  u64 x = (warp + 1) * 0x9e3779b97f4a7c15ull + round / 48 * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  return x >> 40 & 1;
}

// Run `kernel` for all blocks of a grid; those along its last dimension are one cluster. False if threads wait for each other for ever.
inline bool run_grid(Index grid, int threads, size_t shared, const std::function<void()>& kernel) {
  static const std::function<void()>* body;
  body = &kernel;
  grid_size = grid;
  unsigned seed = 1;
  for (int y = 0; y < grid.y; y++)
    for (int x = 0; x < grid.x; x++) {
      std::vector<std::unique_ptr<Block>> blocks;
      std::vector<std::unique_ptr<Thread>> all;
      for (int z = 0; z < grid.z; z++) {
        blocks.push_back(std::make_unique<Block>());
        Block& block = *blocks.back();
        block.memory.assign(FIRST + shared + 512, 0xff);  // NaN until somebody writes
        block.warps.resize(threads / 32);
        block.index = {x, y, z};
        for (int i = 0; i < threads; i++) {
          all.push_back(std::make_unique<Thread>());
          Thread& t = *all.back();
          t.stack.reset(new char[STACK]);
          t.index = {i, 0, 0};
          t.block = &block;
          getcontext(&t.context);
          t.context.uc_stack.ss_sp = t.stack.get();
          t.context.uc_stack.ss_size = STACK;
          t.context.uc_link = &scheduler;
          makecontext(&t.context, +[] { (*body)(), self->done = true; }, 0);
        }
      }
      cluster_threads = &all, cluster_blocks = &blocks, cluster_meeting = {};
      for (size_t left = all.size(), idle = 0, round = 0; left; round++) {
        const size_t before = left;
        for (size_t i = 0; i < all.size(); i++) {
          Thread& t = *all[(i + seed) % all.size()];
          if (t.done || sleeps(t.index.x / 32, round)) continue;
          self = &t;
          swapcontext(&scheduler, &t.context);
          left -= t.done;
        }
        bool moved = left != before;
        for (auto& b : blocks)
          if (!b->boxes.empty() && (seed = seed * 1103515245 + 12345, (seed >> 16) % 16 == 0 || idle > 100)) b->boxes.front()(), b->boxes.pop_front(), moved = true;
        idle = moved ? 0 : idle + 1;
        if (idle > 20000) return false;
      }
    }
  return true;
}
