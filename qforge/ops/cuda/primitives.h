// What the kernels of this folder need of the processor, one instruction or a few each. tests/native/cuda/primitives.h has the same in plain C++, for machines without a GPU.
// KIND: the type of activations and of 16-bit results, 0 fp16, 1 bf16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INLINE __device__ __forceinline__

// Of weights, which are read once: nothing is kept for a second time.
INLINE uint4 load_once16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
INLINE uint2 load_once8(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}

INLINE float float_of(u16 value, int kind) {
  float f;
  if (kind == 0) asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(value));
  else f = __uint_as_float((u32)value << 16);
  return f;
}
INLINE u16 rounded(float f) {
  u16 v;
  if (KIND == 0) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}

// A zero point as two numbers that `codes` adds: -(1024 + zero) or -(128 + zero), twice.
INLINE u32 minus(u32 zero) { return (zero | (KIND == 0 ? 0xE400u : 0xC300u)) * 0x10001u; }
// The nibbles j and j + 4 of a word, less their zero point, exactly: lop3 0xea is (a & b) | c, so that a nibble becomes the low mantissa bits of 1024 (fp16) or 128 (bf16).
INLINE u32 codes(u32 word, int j, u32 zero) {
  u32 v;
  if (KIND == 0)
    asm("{ .reg .b32 t; shr.b32 t, %1, %2; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 %0, t, %3; }" : "=r"(v) : "r"(word), "r"(4 * j), "r"(zero));
  else
    asm("{ .reg .b32 t; shr.b32 t, %1, %2; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 %0, t, %4, %3; }"
        : "=r"(v) : "r"(word), "r"(4 * j), "r"(zero), "r"(0x3f803f80));
  return v;
}
// Those times a scale (twice the same), rounded. volatile: what wgmma reads must be computed before the fence that it begins with.
INLINE u32 scaled_codes(u32 word, int j, u32 zero, u32 scale) {
  u32 v;
  if (KIND == 0)
    asm volatile("{ .reg .b32 t; shr.b32 t, %1, %2; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 t, t, %3; mul.rn.f16x2 %0, t, %4; }"
                 : "=r"(v) : "r"(word), "r"(4 * j), "r"(zero), "r"(scale));
  else
    asm volatile("{ .reg .b32 t; shr.b32 t, %1, %2; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 t, t, %5, %3; fma.rn.bf16x2 %0, t, %4, %6; }"
                 : "=r"(v) : "r"(word), "r"(4 * j), "r"(zero), "r"(scale), "r"(0x3f803f80), "r"(0x80008000));
  return v;
}

// c [16, 8] += a [16, 16] b [16, 8] of a warp, fp32 sums (PTX ISA, mma.m16n8k16).
INLINE void mma(float* c, const u32* a, u32 b0, u32 b1) {
#define MMA(type)                                                                                                                                             \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                  \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (KIND == 0) MMA("f16");
  else MMA("bf16");
#undef MMA
}
INLINE float of_neighbour(float value, int distance) { return __shfl_xor_sync(0xffffffffu, value, distance); }
INLINE void warp_meets() { __syncwarp(); }
INLINE void threads_meet(int which, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory"); }

// Shared memory: what a launch asks for; some words besides; an address within the block.
#define SHARED_MEMORY(name, alignment) extern __shared__ __align__(alignment) unsigned char name[]
#define SHARED_WORDS(name, count) __shared__ __align__(8) u64 name[count]
INLINE u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
INLINE uint2 load8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}
INLINE float4 load_sums(u32 from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from));
  return v;
}
// 16 bytes of global memory, of which those beyond `bytes` are 0, without waiting; `copies_are_there` waits for this thread's.
INLINE void copy16(u32 to, const void* from, int bytes) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)); }
INLINE void copies_are_there() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Capability 9.0 alone from here on: barriers in shared memory, the copy engine, products of 128 threads, clusters of blocks.
INLINE void barrier_begins(u32 at, int arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals)); }
INLINE void barriers_are_there() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
INLINE void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
INLINE void arrive_with(u32 at, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
INLINE void wait_for(u32 at, u32 phase) {
  asm volatile("{ .reg .pred p; again%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done%=; bra again%=; done%=: }" ::"r"(at), "r"(phase) : "memory");
}
struct __align__(64) TensorMap { u64 opaque[16]; };
// A box of a tensor, rows from `row` and columns from `column` on, beyond its end zeros; the barrier learns of the bytes.
INLINE void bring_box(u32 to, const TensorMap* tensor, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(tensor), "r"(column), "r"(row), "r"(barrier) : "memory");
}
// 16 columns of rows of 128 bytes in shared memory, swizzled by the copy engine, as the second operand of wgmma (PTX ISA, matrix descriptors: eight rows are 1024 bytes).
INLINE u64 operand(u32 at) { return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
INLINE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> INLINE void products_are_done() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
template <int COUNT> INLINE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
INLINE void cluster_meets() { asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
INLINE float4 load_sums_of(int block, u32 from) {
  u32 there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there));
  return v;
}
