"""What lies between the products of a decoder: norms, rotation with the write into the paged cache, gated activations.

Letters: T tokens, I features, H query heads, C cache heads, D head size, B pages.
"""

import triton
import triton.language as tl

from qforge.ops.triton.device.w8 import round_to, scale_of


@triton.jit
def rms_norm(x, residual, weight, y, scales, columns, epsilon, ADD: tl.constexpr, LIMIT: tl.constexpr, INT: tl.constexpr, BLOCK: tl.constexpr):
    """y `[T, I]` = x / rms(x) x weight. ADD: x is first added to `residual`, which becomes the sum. LIMIT > 0: y are 8-bit codes with scales `[T]` fp32, one a token. Grid: (T,).

    BLOCK: the power of two from I on.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < columns
    value = tl.load(x + t * columns + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value = (value + tl.load(residual + t * columns + i, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + t * columns + i, value, mask=inside)
        value = value.to(tl.float32)
    square = tl.sum(value * value, axis=0) / columns
    value = value * (1.0 / tl.sqrt(square + epsilon)) * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if LIMIT > 0:
        scale = scale_of(tl.max(tl.abs(value), axis=0, keep_dims=True), LIMIT)
        tl.store(y + t * columns + i, round_to(value, scale, INT), mask=inside)
        tl.store(scales + t + tl.arange(0, 1), scale)
    else:
        tl.store(y + t * columns + i, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, y, columns, BLOCK: tl.constexpr):
    """y `[T, I]` = silu(gate) x up; gate_up `[T, 2 I]` has gate first. Grid: (T, tiles of I)."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < columns
    gate = tl.load(gate_up + t * 2 * columns + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (t * 2 + 1) * columns + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + t * columns + i, (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rope_and_cache(
    qkv, q_norm, k_norm, cosines, sines, positions, slots, q, keys, values, key_scales, value_scales, epsilon,
    NORM: tl.constexpr, HEADS: tl.constexpr, CACHE_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, LIMIT: tl.constexpr, INT: tl.constexpr,
    CALIBRATED: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys by their positions, write queries to q `[T, H, D]` and keys and values to their slots of the cache `[B, PAGE, C, D]`.

    qkv `[T, (H + 2 C) x D]`, cosines and sines `[positions, D / 2]` fp32 (the two halves of a head form the pairs), positions `[T]` int32,
    slots `[T]` int64: page x PAGE + place, or -1 for none. NORM: each head is first divided by its root mean square and multiplied with q_norm or k_norm `[D]`.
    LIMIT > 0: the cache holds 8-bit codes with scales `[B, PAGE, C]` fp32, one a head and token (CALIBRATED: which are there).
    HALF: the power of two from D / 2 on. Grid: (T, H + 2 C).
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    inside = i < D // 2
    source = qkv + (t * (HEADS + 2 * CACHE_HEADS) + head) * D + i
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + CACHE_HEADS:
        if NORM:
            factor = 1.0 / tl.sqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / D + epsilon)
            if head < HEADS:
                first_weight, second_weight = tl.load(q_norm + i, mask=inside, other=0.0), tl.load(q_norm + i + D // 2, mask=inside, other=0.0)
            else:
                first_weight, second_weight = tl.load(k_norm + i, mask=inside, other=0.0), tl.load(k_norm + i + D // 2, mask=inside, other=0.0)
            low *= factor * first_weight.to(tl.float32)
            high *= factor * second_weight.to(tl.float32)
        at = tl.load(positions + t).to(tl.int64) * (D // 2) + i
        cosine, sine = tl.load(cosines + at, mask=inside, other=0.0), tl.load(sines + at, mask=inside, other=0.0)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    slot = tl.load(slots + t)
    if head < HEADS:
        target = q + (t * HEADS + head) * D + i
        tl.store(target, low.to(q.dtype.element_ty), mask=inside)
        tl.store(target + D // 2, high.to(q.dtype.element_ty), mask=inside)
    elif slot >= 0:
        is_key = head < HEADS + CACHE_HEADS
        place = slot * CACHE_HEADS + (head - HEADS) % CACHE_HEADS
        target = place * D + i
        if LIMIT > 0:
            one = tl.arange(0, 1)
            if CALIBRATED:
                scale = tl.load((key_scales if is_key else value_scales) + place + one)
            else:
                scale = scale_of(tl.maximum(tl.max(tl.abs(low), axis=0, keep_dims=True), tl.max(tl.abs(high), axis=0, keep_dims=True)), LIMIT)
                if is_key:
                    tl.store(key_scales + place + one, scale)
                else:
                    tl.store(value_scales + place + one, scale)
            first, second = round_to(low, scale, INT), round_to(high, scale, INT)
        else:
            first, second = low.to(keys.dtype.element_ty), high.to(keys.dtype.element_ty)
        if is_key:
            tl.store(keys + target, first, mask=inside)
            tl.store(keys + target + D // 2, second, mask=inside)
        else:
            tl.store(values + target, first, mask=inside)
            tl.store(values + target + D // 2, second, mask=inside)
