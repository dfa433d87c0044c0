"""Attention over a paged cache: one kernel for decoding and for chunks of a prompt, in one batch.

Letters: T queries of all sequences, one after the other; H query heads, C cache heads (H / C query heads share one), D head size, B pages of PAGE tokens, S sequences,
P parts of a context.
Online softmax and its merging by parts: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def over(
    state, query, from_cache, begin, until, end, place, c, scale, window,
    CACHE_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The state (maximum, sum, mix) after the tokens from `begin` until `until`, of which there are `end`; MASKED: not every query, at `place`, sees them all."""
    most, total, mix = state
    keys, values, key_scales, value_scales, table = from_cache
    d = tl.arange(0, DP)
    d_in = d < D
    for p0 in range(begin, until, TILE):
        p = p0 + tl.arange(0, TILE)
        p_in = p < end
        page = (tl.load(table + p // PAGE, mask=p_in, other=0) if MASKED else tl.load(table + p // PAGE)).to(tl.int64)
        at = (page * PAGE + p % PAGE) * CACHE_HEADS + c
        if MASKED or D < DP:
            k = tl.load(keys + at[None, :] * D + d[:, None], mask=p_in[None, :] & d_in[:, None], other=0.0)
            v = tl.load(values + at[:, None] * D + d[None, :], mask=p_in[:, None] & d_in[None, :], other=0.0)
        else:
            k = tl.load(keys + at[None, :] * D + d[:, None])
            v = tl.load(values + at[:, None] * D + d[None, :])
        k, v = k.to(tl.float32 if INTERPRETED else query.dtype), v.to(tl.float32 if INTERPRETED else query.dtype)
        logits = (tl.dot(query.to(tl.float32), k) if INTERPRETED else tl.dot(query, k)) * (scale * 1.4426950408889634)
        if QUANTIZED:
            logits *= tl.load(key_scales + at, mask=p_in, other=0.0)[None, :]
        if MASKED:
            seen = p_in[None, :] & (p[None, :] <= place[:, None])
            if WINDOW:
                seen = seen & (p[None, :] > place[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(most, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new  # nothing seen yet: exp2(-inf - 0) is 0
        weights = tl.math.exp2(logits - base[:, None])
        fade = tl.math.exp2(most - base)
        total = total * fade + tl.sum(weights, 1)
        if QUANTIZED:
            weights *= tl.load(value_scales + at, mask=p_in, other=0.0)[None, :]
        weights = weights.to(query.dtype)
        mix = mix * fade[:, None] + (tl.dot(weights.to(tl.float32), v) if INTERPRETED else tl.dot(weights, v))
        most = new
    return most, total, mix


@triton.jit(do_not_specialize=["queries", "table_stride", "window"])
def paged_attention(
    q, keys, values, key_scales, value_scales, tables, starts, lengths, out, most_out, sum_out, scale, queries, table_stride, window,
    HEADS: tl.constexpr, CACHE_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out `[T, H, D]` = softmax(scale q k^T) v, each query over the tokens up to its own, the last `window` of them with WINDOW.

    q `[T, H, D]`, keys and values `[B, PAGE, C, D]` in q's type or, QUANTIZED, in 8 bits with scales `[B, PAGE, C]` fp32; tables `[S, table_stride]` int32: pages of a sequence;
    starts `[S + 1]` int32: its queries; lengths `[S]` int32: tokens in the cache, these queries' own included. DP: the power of two from D on.
    PARTS > 1: out `[P, T, H, D]` fp32 is not yet divided, most_out and sum_out `[P, T, H]` fp32 are its maximum (base 2) and sum. Grid: (tiles of queries, C, S x P).
    """
    SHARED: tl.constexpr = HEADS // CACHE_HEADS
    TOKENS: tl.constexpr = BM // SHARED
    c, s, part = tl.program_id(1), tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    start, length = tl.load(starts + s), tl.load(lengths + s)
    count = tl.load(starts + s + 1) - start
    first = tl.program_id(0) * TOKENS
    if first >= count:
        return
    r, d = tl.arange(0, BM), tl.arange(0, DP)
    token = first + r // SHARED
    here = (r < TOKENS * SHARED) & (token < count)
    row = (start + token).to(tl.int64) * HEADS + c * SHARED + r % SHARED
    place = length - count + token
    d_in = d < D
    query = tl.load(q + row[:, None] * D + d[None, :], mask=here[:, None] & d_in[None, :], other=0.0)
    end = tl.minimum(length - count + first + TOKENS, length)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - count + first - window + 1, 0) // TILE * TILE
    span = tl.cdiv(tl.cdiv(end - begin, TILE), PARTS) * TILE
    begin += part * span
    end = tl.minimum(begin + span, end)
    state = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, DP), tl.float32)
    whole = begin  # up to here every query sees every token
    if not WINDOW:
        whole = tl.maximum(begin, tl.minimum(length - count + first + 1, end) // TILE * TILE)
    from_cache = keys, values, key_scales, value_scales, tables + s * table_stride
    state = over(state, query, from_cache, begin, whole, end, place, c, scale, window, CACHE_HEADS, D, DP, PAGE, QUANTIZED, WINDOW, False, TILE)
    most, total, mix = over(state, query, from_cache, whole, end, end, place, c, scale, window, CACHE_HEADS, D, DP, PAGE, QUANTIZED, WINDOW, True, TILE)
    write = here[:, None] & d_in[None, :]
    if PARTS == 1:
        tl.store(out + row[:, None] * D + d[None, :], (mix / total[:, None]).to(out.dtype.element_ty), mask=write)
    else:
        row += part.to(tl.int64) * queries * HEADS
        tl.store(out + row[:, None] * D + d[None, :], mix, mask=write)
        tl.store(most_out + row, most, mask=here)
        tl.store(sum_out + row, total, mask=here)


@triton.jit(do_not_specialize=["rows"])
def merge_parts(parts, most_in, sum_in, out, rows, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr):
    """out `[T, H, D]` from the parts that `paged_attention` left. Grid: (T x H,)."""
    row = tl.program_id(0).to(tl.int64)
    d, p = tl.arange(0, DP), tl.arange(0, PARTS)
    each = p * rows + row
    most = tl.load(most_in + each)
    share = tl.math.exp2(most - tl.max(most, 0))
    total = tl.sum(tl.load(sum_in + each) * share, 0)
    mix = tl.load(parts + each[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    tl.store(out + row * D + d, (tl.sum(mix * share[:, None], 0) / total).to(out.dtype.element_ty), mask=d < D)
