"""Matrix products with 4-bit integer weights and fp16 or bf16 activations, fp32 sums.

Letters: M rows of x, N outputs, K inputs, G groups of inputs (one scale each), S parts of K. Weights: `pack_w4` of qforge/ops/triton/w4_pack.py.

Codes are exact in fp16 and bf16, and in `w4_gemm` scales multiply fp32 sums of a group: the only roundings are those of fp32 sums and of the result.
"""

import triton
import triton.language as tl

from qforge.ops.triton.device.parts import finish

# lop3 0xea is (a & b) | c: a nibble becomes the low mantissa bits of 1024 (fp16) or 128 (bf16), from which -(1024 + zero) or -(128 + zero) is then added, exactly.
# fma by one instead of add in bf16, because sm_80 has no bf16x2 addition. $8 and $9 are two neighbours, words 2 c and 2 c + 1 of a row; $10 is their zero points.
_HALF = """{ .reg .b32 t;
lop3.b32 t, $8, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $0, t, $10;
shr.b32 t, $8, 4; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $1, t, $10;
shr.b32 t, $8, 8; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $2, t, $10;
shr.b32 t, $8, 12; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $3, t, $10;
lop3.b32 t, $9, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $4, t, $10;
shr.b32 t, $9, 4; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $5, t, $10;
shr.b32 t, $9, 8; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $6, t, $10;
shr.b32 t, $9, 12; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 $7, t, $10; }"""
_BF16 = """{ .reg .b32 t, one;
mov.b32 one, 0x3f803f80;
lop3.b32 t, $8, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, one, $10;
shr.b32 t, $8, 4; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $1, t, one, $10;
shr.b32 t, $8, 8; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $2, t, one, $10;
shr.b32 t, $8, 12; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $3, t, one, $10;
lop3.b32 t, $9, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $4, t, one, $10;
shr.b32 t, $9, 4; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $5, t, one, $10;
shr.b32 t, $9, 8; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $6, t, one, $10;
shr.b32 t, $9, 12; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $7, t, one, $10; }"""
HALF = tl.constexpr(_HALF)
BF16 = tl.constexpr(_BF16)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")


@triton.jit
def unpack(words, zeros, DTYPE: tl.constexpr):
    """Words `[N, 16]` int32 and their zero points `[N, 16]` (or broadcastable) int32 -> codes less zero points, eight of `[N, 16]` in DTYPE, 16 inputs each.

    There is nothing here but operations on single elements: so the compiler reads words as the tensor cores want their operand, and codes never pass through shared memory.
    The assembly takes two neighbours at a time, as every layout has them in one thread (benchmarks/triton_budget.py looks).
    """
    if tl.float16 == DTYPE:
        codes = tl.inline_asm_elementwise(HALF, REGISTERS, [words, (zeros | 0xE400) * 0x10001], dtype=(tl.float16,) * 8, is_pure=True, pack=2)
    else:
        codes = tl.inline_asm_elementwise(BF16, REGISTERS, [words, (zeros | 0xC300) * 0x10001], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2)
    return codes


@triton.jit
def nibble(words, zeros, J: tl.constexpr, DTYPE: tl.constexpr):
    """The J-th of `unpack` in plain Triton, for the interpreter, which knows no assembly: from words that have the pair's half in the place of both."""
    shift = J % 4 * 4 + tl.arange(0, 16) % 2 * 16
    return (((words >> shift[None, :]) & 15) - zeros[:, None]).to(tl.float32).to(DTYPE)


@triton.jit
def of_runs(values, step, row, n_rows, GROUP: tl.constexpr, RUNS: tl.constexpr):
    """values `[G, N]` of each of the RUNS runs of inputs of a step that share them: a tuple of `[N]`."""
    k = step * 128
    if RUNS == 1:
        found = (of_group(values, k, row, n_rows, GROUP),)
    elif RUNS == 2:
        found = of_group(values, k, row, n_rows, GROUP), of_group(values, k + 64, row, n_rows, GROUP)
    elif RUNS == 4:
        found = (
            of_group(values, k, row, n_rows, GROUP), of_group(values, k + 32, row, n_rows, GROUP), of_group(values, k + 64, row, n_rows, GROUP),
            of_group(values, k + 96, row, n_rows, GROUP),
        )  # fmt: skip
    else:
        found = (
            of_group(values, k, row, n_rows, GROUP), of_group(values, k + 16, row, n_rows, GROUP), of_group(values, k + 32, row, n_rows, GROUP),
            of_group(values, k + 48, row, n_rows, GROUP), of_group(values, k + 64, row, n_rows, GROUP), of_group(values, k + 80, row, n_rows, GROUP),
            of_group(values, k + 96, row, n_rows, GROUP), of_group(values, k + 112, row, n_rows, GROUP),
        )  # fmt: skip
    return found


@triton.jit
def of_group(values, k, row, n_rows, GROUP: tl.constexpr):
    """values `[G, N]` of an input's group: `[N]`."""
    return tl.load(values + k // GROUP * n_rows + row)


@triton.jit(do_not_specialize=["m_rows", "steps"])  # else each kind of batch is compiled anew, for nothing
def w4_gemm(
    x, words, scales, zeros, bias, y, parts, turns, m_rows, n_rows, k_columns, k_steps, steps,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y = x w^T + bias, with SPLIT in parts of `steps` steps of 128 inputs (`finish`).

    GROUP: inputs that share a scale, 0 for a whole row; RUN: how many of them stand together in a step, 16 to 128.
    x `[M, K]`, words `[k_steps, N, 16]`, scales `[G, N]`, zeros `[G, N]` uint8, y `[M, N]`. Grid: (tiles of N, tiles of M, S).
    """
    dtype: tl.constexpr = x.dtype.element_ty
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    row, token = tl.where(rn < n_rows, rn, 0), tl.where(rm < m_rows, rm, 0)
    rk = tl.arange(0, 16)
    total = tl.zeros((BN, BM), tl.float32)
    first = part * steps
    last = tl.minimum(first + steps, k_steps)
    at_words = words + row[:, None] * 16 + rk[None, :]
    at_x = x + token.to(tl.int64)[None, :] * k_columns + rk[:, None]
    if GROUP > 0:
        ahead = of_runs(scales, tl.minimum(first, k_steps - 1), row, n_rows, GROUP, 128 // RUN)
    for step in range(first, last):
        if GROUP > 0:  # a step before they are needed: nothing else would hide how long they take to come
            of_scales = ahead
            ahead = of_runs(scales, tl.minimum(step + 1, last - 1), row, n_rows, GROUP, 128 // RUN)
        if HAS_ZEROS:
            of_zeros = of_runs(zeros, step if GROUP > 0 else 0, row, n_rows, GROUP if GROUP > 0 else 128, 128 // RUN)
        w = tl.load(at_words + step * n_rows * 16)
        product = total  # of a run; any value will do here
        for j in tl.static_range(8):
            if j * 16 % RUN == 0:
                z = of_zeros[j * 16 // RUN].to(tl.int32) if HAS_ZEROS else tl.full((BN,), 8, tl.int32)
                if not INTERPRETED:
                    codes = unpack(w, tl.broadcast_to(z[:, None], (BN, 16)), dtype)
            k = step * 128 + j * 16
            a = tl.load(at_x + k) if EVEN_K else tl.load(at_x + k, mask=(k + rk < k_columns)[:, None], other=0.0)
            if INTERPRETED:  # its product of bf16 is wrong
                half = words + step * n_rows * 16 + row[:, None] * 16 + (rk // 2 * 2 + j // 4)[None, :]
                c, a = nibble(tl.load(half), z, j, dtype).to(tl.float32), a.to(tl.float32)
            else:
                c = codes[j]
            if GROUP == 0:
                total = tl.dot(c, a, total)
            else:
                product = tl.dot(c, a) if j * 16 % RUN == 0 else tl.dot(c, a, product)
                if (j + 1) * 16 % RUN == 0:
                    total += product * of_scales[j * 16 // RUN].to(tl.float32)[:, None]
    if GROUP == 0:
        total *= tl.load(scales + row).to(tl.float32)[:, None]
    finish(total, rn, rm, bias, y, parts, turns, m_rows, n_rows, HAS_BIAS, SPLIT)


@triton.jit
def w4_dense(
    words, scales, zeros, y, first, n_rows, k_columns, y_rows,
    HAS_ZEROS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y `[y_rows, K]` = the weights of the outputs from `first` on, in y's type. Words, scales and zeros as `w4_gemm` has them. Grid: (steps, tiles of outputs)."""
    dtype: tl.constexpr = y.dtype.element_ty
    step, rn, rk = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, 16)
    row = tl.where(rn < y_rows, first + rn, 0)
    w = tl.load(words + step * n_rows * 16 + row[:, None] * 16 + rk[None, :])
    for j in tl.static_range(8):
        if j * 16 % RUN == 0:
            g = (step * 128 + j * 16) // GROUP if GROUP > 0 else 0
            s = tl.load(scales + g * n_rows + row).to(tl.float32)
            z = tl.load(zeros + g * n_rows + row).to(tl.int32) if HAS_ZEROS else tl.full((BN,), 8, tl.int32)
            if not INTERPRETED:
                codes = unpack(w, tl.broadcast_to(z[:, None], (BN, 16)), dtype)
        half = words + step * n_rows * 16 + row[:, None] * 16 + (rk // 2 * 2 + j // 4)[None, :]
        c = nibble(tl.load(half), z, j, dtype) if INTERPRETED else codes[j]
        k = step * 128 + j * 16 + rk
        inside = (rn < y_rows)[:, None] if EVEN_K else (rn < y_rows)[:, None] & (k < k_columns)[None, :]
        tl.store(y + rn.to(tl.int64)[:, None] * k_columns + k[None, :], (c.to(tl.float32) * s[:, None]).to(dtype), mask=inside)
