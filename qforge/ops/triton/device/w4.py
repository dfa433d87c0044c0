"""Matrix products with 4-bit integer weights and fp16 or bf16 activations, fp32 sums.

Letters: M rows of x, N outputs, K inputs, G groups of inputs (one scale each), W = K/8 words, S parts of K. Weights: `pack_w4` of qforge/ops/triton/w4_pack.py.

Codes are exact in fp16 and bf16, and scales multiply fp32 sums of a group: the only roundings are those of fp32 sums and of the result.
"""

import triton
import triton.language as tl

# lop3 0xea is (a & b) | c: a nibble becomes the low mantissa bits of 1024 (fp16) or 128 (bf16), from which -(1024 + zero) or -(128 + zero) is then added, exactly.
# fma by one instead of add in bf16, because sm_80 has no bf16x2 addition.
_HALF = """{ .reg .b32 t, h;
lop3.b32 h, $8, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 h, h, $9; mov.b32 {$0, $1}, h;
shr.b32 t, $8, 4; lop3.b32 h, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 h, h, $9; mov.b32 {$2, $3}, h;
shr.b32 t, $8, 8; lop3.b32 h, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 h, h, $9; mov.b32 {$4, $5}, h;
shr.b32 t, $8, 12; lop3.b32 h, t, 0x000f000f, 0x64006400, 0xea; add.rn.f16x2 h, h, $9; mov.b32 {$6, $7}, h; }"""
_BF16 = """{ .reg .b32 t, h, one;
mov.b32 one, 0x3f803f80;
lop3.b32 h, $8, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 h, h, one, $9; mov.b32 {$0, $1}, h;
shr.b32 t, $8, 4; lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 h, h, one, $9; mov.b32 {$2, $3}, h;
shr.b32 t, $8, 8; lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 h, h, one, $9; mov.b32 {$4, $5}, h;
shr.b32 t, $8, 12; lop3.b32 h, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 h, h, one, $9; mov.b32 {$6, $7}, h; }"""
HALF = tl.constexpr(_HALF)
BF16 = tl.constexpr(_BF16)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
REGISTERS = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")


@triton.jit
def in_order(a, b, c, d, e, f, g, h):
    """Eight values of each word `[N, W]` -> `[N, W, 8]`."""
    even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(a.shape[0], a.shape[1], 8)


@triton.jit
def unpack(words, zeros, DTYPE: tl.constexpr):
    """Words `[N, W]` int32 and their zero points `[N, W]` (or broadcastable) int32 -> codes less zero points `[N, W, 8]` in DTYPE.

    In plain Triton for the interpreter, which knows no assembly.
    """
    if not INTERPRETED:
        if tl.float16 == DTYPE:
            bias = (zeros | 0xE400) * 0x10001
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(HALF, REGISTERS, [words, bias], dtype=(tl.float16,) * 8, is_pure=True, pack=1)
        else:
            bias = (zeros | 0xC300) * 0x10001
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(BF16, REGISTERS, [words, bias], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1)
        codes = in_order(a, b, c, d, e, f, g, h)
    else:
        place = tl.arange(0, 8)
        shift = ((place & 1) * 16 + (place >> 1) * 4)[None, None, :]
        codes = (((words[:, :, None] >> shift) & 15) - zeros[:, :, None]).to(tl.float32).to(DTYPE)
    return codes


@triton.jit(do_not_specialize=["m_rows", "steps"])  # else each kind of batch is compiled anew, for nothing
def w4_gemm(
    x, words, scales, zeros, bias, y, m_rows, n_rows, k_columns, k_words, steps,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = x w^T + bias, or with SPLIT the partial sums `[S, M, N]` fp32 of K in parts of `steps` steps. BK divides the group, so that one scale a row covers a step;
    GROUP 0 is one scale a row.

    x `[M, K]`, words `[N, k_words]`, scales `[G, N]`, zeros `[G, N]` uint8, y `[M, N]`. Grid: (tiles of N, tiles of M, S).
    """
    dtype: tl.constexpr = x.dtype.element_ty
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    n_in, m_in = rn < n_rows, rm < m_rows
    row, token = tl.where(n_in, rn, 0), tl.where(m_in, rm, 0)
    rk, rw = tl.arange(0, BK), tl.arange(0, BK // 8)
    total = tl.zeros((BN, BM), tl.float32)
    first = part * steps * (BK // 8)
    for word in range(first, tl.minimum(first + steps * (BK // 8), k_words), BK // 8):  # by words: Triton then sees that loads of 16 bytes are aligned
        w = tl.load(words + row.to(tl.int64)[:, None] * k_words + (word + rw)[None, :])
        k = word * 8
        g = 0 if GROUP == 0 else k // GROUP
        z = tl.load(zeros + g * n_rows + rn, mask=n_in, other=0).to(tl.int32) if HAS_ZEROS else tl.full((BN,), 8, tl.int32)
        w = unpack(w, tl.broadcast_to(z[:, None], (BN, BK // 8)), dtype).reshape(BN, BK)
        columns = k + rk
        at = x + token.to(tl.int64)[None, :] * k_columns + columns[:, None]
        a = tl.load(at) if EVEN_K else tl.load(at, mask=(columns < k_columns)[:, None], other=0.0)
        if INTERPRETED:  # its product of bf16 is wrong
            w, a = w.to(tl.float32), a.to(tl.float32)
        if GROUP == 0:
            total = tl.dot(w, a, total)
        else:
            s = tl.load(scales + g * n_rows + rn, mask=n_in, other=0.0).to(tl.float32)
            total += tl.dot(w, a) * s[:, None]
    if GROUP == 0:
        total *= tl.load(scales + rn, mask=n_in, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS and not SPLIT:
        total += tl.load(bias + rn, mask=n_in, other=0.0).to(tl.float32)[:, None]
    out = y + part.to(tl.int64) * m_rows * n_rows + rm.to(tl.int64)[None, :] * n_rows + rn[:, None]
    tl.store(out, total.to(y.dtype.element_ty), mask=n_in[:, None] & m_in[None, :])


@triton.jit
def w4_gemv(
    x, words, scales, zeros, bias, y, n_rows, k_columns, k_words,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """As `w4_gemm` for one row (`x [K]`, `y [N]`), without tensor cores. BW: words a step, of any number of groups. Grid: (tiles of N,)."""
    dtype: tl.constexpr = x.dtype.element_ty
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = rn < n_rows
    row = tl.where(n_in, rn, 0)
    eight, rw = tl.arange(0, 8), tl.arange(0, BW)
    total = tl.zeros((BN, BW), tl.float32)
    for k in range(0, k_words, BW):
        columns = k + rw
        inside = columns < k_words
        at = words + row.to(tl.int64)[:, None] * k_words + columns[None, :]
        w = tl.load(at) if EVEN_K else tl.load(at, mask=inside[None, :], other=0)
        of_group = (0 * columns if GROUP == 0 else columns // (GROUP // 8))[None, :] * n_rows + row[:, None]
        z = tl.load(zeros + of_group, mask=inside[None, :], other=0).to(tl.int32) if HAS_ZEROS else tl.full((BN, BW), 8, tl.int32)
        inputs = columns[:, None] * 8 + eight[None, :]
        a = tl.load(x + inputs) if EVEN_K else tl.load(x + inputs, mask=inputs < k_columns, other=0.0)
        products = tl.sum(unpack(w, z, dtype).to(tl.float32) * a.to(tl.float32)[None, :, :], axis=2)
        if GROUP == 0:
            total += products
        else:
            total += products * tl.load(scales + of_group, mask=inside[None, :], other=0.0).to(tl.float32)
    result = tl.sum(total, axis=1)
    if GROUP == 0:
        result *= tl.load(scales + rn, mask=n_in, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + rn, mask=n_in, other=0.0).to(tl.float32)
    tl.store(y + rn, result.to(y.dtype.element_ty), mask=n_in)


@triton.jit(do_not_specialize=["m_rows"])
def add_parts(parts, bias, y, m_rows, n_rows, S: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y `[M, N]` = the sum of parts `[S, M, N]` fp32, always in the same order, + bias `[N]`. Grid: (tiles of N, M)."""
    m = tl.program_id(1).to(tl.int64)
    rn = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n_in = rn < n_rows
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        total += tl.load(parts + (s * m_rows + m) * n_rows + rn, mask=n_in, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + rn, mask=n_in, other=0.0).to(tl.float32)
    tl.store(y + m * n_rows + rn, total.to(y.dtype.element_ty), mask=n_in)
