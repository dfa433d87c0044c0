"""Attention over a paged cache: one kernel for decoding and for chunks of a prompt, in one batch.

Letters: T queries of all sequences, one after the other; H query heads, C cache heads (H / C query heads share one), D head size, B pages of PAGE tokens, S sequences,
P parts of a context.
Online softmax and its merging by parts: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit(do_not_specialize=["queries", "table_stride", "window"])
def paged_attention(
    q, keys, values, key_scales, value_scales, tables, starts, lengths, out, most_out, sum_out, scale, queries, table_stride, window,
    HEADS: tl.constexpr, CACHE_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, QUANTIZED: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    LARGE: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out `[T, H, D]` = softmax(scale q k^T) v, each query over the tokens up to its own, the last `window` of them with WINDOW.

    q `[T, H, D]`, keys and values `[B, PAGE, C, D]` in q's type or, QUANTIZED, in 8 bits with scales `[B, PAGE, C]` fp32; tables `[S, table_stride]` int32: pages of a sequence;
    starts `[S + 1]` int32: its queries; lengths `[S]` int32: tokens in the cache, these queries' own included. DP: the power of two from D on.
    PARTS > 1: out `[P, T, H, D]` fp32 is not yet divided, most_out and sum_out `[P, T, H]` fp32 are its maximum (base 2) and sum. LARGE: keys have 2^31 elements or more.
    Grid: (tiles of queries, C, S x P).
    """
    SHARED: tl.constexpr = HEADS // CACHE_HEADS
    TOKENS: tl.constexpr = BM // SHARED
    c, s, part = tl.program_id(1), tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    start, length = tl.load(starts + s), tl.load(lengths + s)
    count = tl.load(starts + s + 1) - start
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS  # those with the most to do come first
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
    seen_by_all = length - count + first + 1  # tokens
    scale *= 1.4426950408889634
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mix = tl.zeros((BM, DP), tl.float32)
    table = tables + s * table_stride
    ahead = tl.load(table + tl.minimum(begin + tl.arange(0, TILE), length - 1) // PAGE)
    for p0 in range(begin, end, TILE):
        p = p0 + tl.arange(0, TILE)
        page = ahead.to(tl.int64) if LARGE else ahead
        ahead = tl.load(table + tl.minimum(p + TILE, length - 1) // PAGE)  # a step before they are needed: keys and values wait for them
        at = (page * PAGE + tl.minimum(p, length - 1) % PAGE) * CACHE_HEADS + c  # beyond the end the last one again, which nobody sees there
        if D == DP:
            k, v = tl.load(keys + at[None, :] * D + d[:, None]), tl.load(values + at[:, None] * D + d[None, :])
        else:
            k = tl.load(keys + at[None, :] * D + d[:, None], mask=d_in[:, None], other=0.0)
            v = tl.load(values + at[:, None] * D + d[None, :], mask=d_in[None, :], other=0.0)
        k, v = k.to(tl.float32 if INTERPRETED else query.dtype), v.to(tl.float32 if INTERPRETED else query.dtype)
        logits = tl.dot(query.to(tl.float32), k) if INTERPRETED else tl.dot(query, k)
        if QUANTIZED:
            logits *= tl.load(key_scales + at)[None, :]
        if WINDOW or p0 + TILE > seen_by_all:
            seen = (p < end)[None, :] & (p[None, :] <= place[:, None])
            if WINDOW:
                seen = seen & (p[None, :] > place[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(most, tl.max(logits, 1))
        base = tl.where(new == float("-inf"), 0.0, new) * scale  # nothing seen yet: exp2(-inf - 0) is 0
        weights = tl.math.exp2(logits * scale - base[:, None])
        fade = tl.math.exp2(most * scale - base)
        total = total * fade + tl.sum(weights, 1)
        if QUANTIZED:
            weights *= tl.load(value_scales + at)[None, :]
        weights = weights.to(query.dtype)
        mix = mix * fade[:, None] + (tl.dot(weights.to(tl.float32), v) if INTERPRETED else tl.dot(weights, v))
        most = new
    write = here[:, None] & d_in[None, :]
    if PARTS == 1:
        tl.store(out + row[:, None] * D + d[None, :], (mix / total[:, None]).to(out.dtype.element_ty), mask=write)
    else:
        row += part.to(tl.int64) * queries * HEADS
        tl.store(out + row[:, None] * D + d[None, :], mix, mask=write)
        tl.store(most_out + row, most * scale, mask=here)
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
