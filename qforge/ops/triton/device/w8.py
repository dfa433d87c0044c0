"""Matrix products of 8-bit integers or e4m3 floats, and the rounding of activations before them: per token or per group of inputs.

Letters: M rows of x, N outputs, K inputs, G groups of inputs, S parts of K. Weights `[N, K]` int8 or float8_e4m3fn, K contiguous, scales `[G, N]` fp32 (G = 1 for one scale a row).
"""

import triton
import triton.language as tl

from qforge.ops.triton.device.parts import finish

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def scale_of(amount, LIMIT: tl.constexpr):
    """`numerics.activation_scale`: the fp32 scale that maps magnitudes up to `amount` onto LIMIT; 1 for 0."""
    scale = tl.div_rn(amount, tl.full(amount.shape, LIMIT, tl.float32))
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def nearest_e4m3(values):
    """fp32 values that e4m3 holds: the interpreter's conversion cuts off, a GPU's rounds."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < 2.0**-6, (values + 24576.0) - 24576.0, normal)


@triton.jit
def round_to(values, scale, INT: tl.constexpr):
    """Nearest codes, ties to even: int8 for INT, else e4m3."""
    scaled = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    if INT:
        nearest = (scaled + 12582912.0) - 12582912.0  # 1.5 x 2^23: fp32 numbers of this size have a spacing of 1
        codes = tl.minimum(tl.maximum(nearest, -128.0), 127.0).to(tl.int8)
    else:
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        codes = (nearest_e4m3(scaled) if INTERPRETED else scaled).to(tl.float8e4nv)
    return codes


@triton.jit
def round_rows(x, codes, scales, k_columns, span, LIMIT: tl.constexpr, INT: tl.constexpr, BLOCK: tl.constexpr):
    """x `[M, K]` -> codes `[M, K]` and scales `[M, G]` fp32, one for each `span` inputs. Grid: (M, G)."""
    m, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    start = m * k_columns + g * span
    most = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, span, BLOCK):
        inside = (k + offsets < span) & (g * span + k + offsets < k_columns)
        most = tl.maximum(most, tl.abs(tl.load(x + start + k + offsets, mask=inside, other=0.0).to(tl.float32)))
    scale = scale_of(tl.max(most, axis=0, keep_dims=True), LIMIT)
    for k in range(0, span, BLOCK):
        inside = (k + offsets < span) & (g * span + k + offsets < k_columns)
        values = tl.load(x + start + k + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + start + k + offsets, round_to(values, scale, INT), mask=inside)
    one = tl.arange(0, 1)
    tl.store(scales + m * tl.num_programs(1) + g + one, scale)


@triton.jit(do_not_specialize=["m_rows"])
def w8_gemm(
    x, input_scales, codes, scales, bias, y, parts, turns, m_rows, n_rows, k_columns, k_part,
    GROUP: tl.constexpr, INPUT_GROUP: tl.constexpr, INT: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = x w^T + bias, with SPLIT in parts of `k_part` inputs (`finish`).

    x `[M, K]`: codes, with input_scales `[M, G]` fp32 (`round_rows`). GROUP, INPUT_GROUP: inputs that share a scale of the weight or of x; 0 for all, else a multiple of BK.
    Grid: (tiles of N, tiles of M, S).
    """
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    n_in, m_in = rn < n_rows, rm < m_rows
    rk = tl.arange(0, BK)
    from_w = codes + tl.where(n_in, rn, 0).to(tl.int64)[:, None] * k_columns + rk[None, :]
    from_x = x + tl.where(m_in, rm, 0).to(tl.int64)[None, :] * k_columns + rk[:, None]
    total = tl.zeros((BN, BM), tl.int32 if INT and GROUP == 0 and INPUT_GROUP == 0 and not INTERPRETED else tl.float32)
    for k in range(part * k_part, tl.minimum((part + 1) * k_part, k_columns), BK):
        inside = k + rk < k_columns
        w = tl.load(from_w + k) if EVEN_K else tl.load(from_w + k, mask=inside[None, :], other=0.0)
        a = tl.load(from_x + k) if EVEN_K else tl.load(from_x + k, mask=inside[:, None], other=0.0)
        if INTERPRETED:
            w, a = w.to(tl.float32), a.to(tl.float32)
        if GROUP == 0 and INPUT_GROUP == 0:
            total = tl.dot(w, a, total, out_dtype=total.dtype) if INT else tl.dot(w, a, total, max_num_imprecise_acc=BK)
        else:
            product = tl.dot(w, a, out_dtype=tl.int32 if INT and not INTERPRETED else tl.float32).to(tl.float32)
            if GROUP > 0:
                product *= tl.load(scales + (k // GROUP) * n_rows + rn, mask=n_in, other=0.0)[:, None]
            if INPUT_GROUP > 0:
                at = rm.to(tl.int64) * tl.cdiv(k_columns, INPUT_GROUP) + k // INPUT_GROUP
                product *= tl.load(input_scales + at, mask=m_in, other=0.0)[None, :]
            total += product
    result = total.to(tl.float32)
    if GROUP == 0:
        result *= tl.load(scales + rn, mask=n_in, other=0.0)[:, None]
    if INPUT_GROUP == 0:
        result *= tl.load(input_scales + rm, mask=m_in, other=0.0)[None, :]
    finish(result, rn, rm, bias, y, parts, turns, m_rows, n_rows, HAS_BIAS, SPLIT)
