"""Launch attention over a paged cache, and the write into it.

Letters: T queries, H query heads, C cache heads, D head size, B pages of so many tokens, S sequences, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qforge.ops.triton import tiles
from qforge.ops.triton.present import capability, processors
from qforge.ops.triton.tiles import Tile

LIMITS = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}  # as numerics.largest
_PART_TOKENS = 256  # the fewest tokens of a context that are worth a part of their own
_MOST_PARTS = 16


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """Keys and values of one layer.

    Attributes:
        keys, values: `[B, PAGE, C, D]` fp16, bf16, int8 or float8_e4m3fn.
        key_scales, value_scales: `[B, PAGE, C]` fp32 for 8 bits, else None.
        calibrated: whether these were there before keys and values, which are rounded with them; else each gets one of its own.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    calibrated: bool = False

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return int(self.keys.shape[1])

    @property
    def heads(self) -> int:
        """C, heads of keys and of values."""
        return int(self.keys.shape[2])


def empty_cache(
    pages: int, page: int, heads: int, size: int, dtype: torch.dtype, device: str | torch.device, calibrated: tuple[float, float] | None = None
) -> PagedCache:  # fmt: skip
    """A cache of so many pages, zero; `calibrated`: one scale for all keys and one for all values."""
    keys = torch.zeros((pages, page, heads, size), dtype=dtype, device=device)
    if dtype not in LIMITS:
        return PagedCache(keys, torch.zeros_like(keys))
    of_keys, of_values = (torch.full((pages, page, heads), scale, device=device) for scale in calibrated or (1.0, 1.0))
    return PagedCache(keys, torch.zeros_like(keys), of_keys, of_values, calibrated is not None)


def rotate_and_store(
    qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, heads: int, cache: PagedCache,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotated queries `[T, H, D]`; keys (rotated) and values go into the cache. Arguments as `device.pointwise.rope_and_cache` has them.

    Args:
        norms: weights `[D]` of the norms that each head of the queries and of the keys gets first, and their epsilon.
    """
    from qforge.ops.triton.device.pointwise import rope_and_cache

    size = cache.keys.shape[3]
    q = qkv.new_empty((len(qkv), heads, size))
    q_norm, k_norm, epsilon = norms or (None, None, 0.0)
    rope_and_cache[(len(qkv), heads + 2 * cache.heads)](
        qkv, q_norm, k_norm, cosines, sines, positions, slots, q, cache.keys, cache.values, cache.key_scales, cache.value_scales, epsilon,
        NORM=norms is not None, HEADS=heads, CACHE_HEADS=cache.heads, D=size, HALF=_power(size // 2),
        LIMIT=LIMITS.get(cache.keys.dtype, 0.0), INT=cache.keys.dtype == torch.int8, CALIBRATED=cache.calibrated, num_warps=1,
    )  # fmt: skip
    return q


def attention(
    q: torch.Tensor, cache: PagedCache, tables: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, *,
    longest: int, longest_context: int, scale: float, window: int = 0, parts: int | None = None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """`[T, H, D]` in q's dtype: each query over its sequence up to itself, or over the last `window` tokens if that is not 0. See `device.attention.paged_attention`.

    Args:
        longest: the most queries of a sequence; longest_context: the most tokens. Known on the host, so that nothing waits for the GPU.
        parts: a power of two; None: as many as fill the GPU.
    """
    from qforge.ops.triton.device.attention import merge_parts, paged_attention

    queries, heads, size = q.shape
    shared, sequences, of = heads // cache.heads, len(lengths), tiles.device_class(capability(q.device))
    tile = tile or tiles.attention_tile(of, size, longest * shared, cache.key_scales is not None)
    blocks = -(-longest // (tile.m // shared))
    parts = parts or _parts(blocks * cache.heads * sequences, min(longest_context, window or longest_context), processors(q.device))
    out = torch.empty_like(q)
    mix = out if parts == 1 else torch.empty((parts, *q.shape), device=q.device)
    most = torch.empty((2, parts, queries, heads), device=q.device)
    paged_attention[(blocks, cache.heads, sequences * parts)](
        q.contiguous(), cache.keys, cache.values, cache.key_scales, cache.value_scales, tables, starts, lengths, mix, most[0], most[1], scale, queries, tables.shape[1], window,
        HEADS=heads, CACHE_HEADS=cache.heads, D=size, DP=_power(size), PAGE=cache.page, QUANTIZED=cache.key_scales is not None, WINDOW=window > 0, PARTS=parts,
        LARGE=cache.keys.numel() >= 1 << 31, BM=tile.m, TILE=tile.n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        merge_parts[(queries * heads,)](mix, most[0], most[1], out, queries * heads, D=size, DP=_power(size), PARTS=parts, num_warps=1)
    return out


def _parts(blocks: int, context: int, processors: int) -> int:
    """A power of two, doubled while there are fewer than two blocks for each processor and parts are long enough."""
    parts = 1
    while parts < _MOST_PARTS and blocks * parts < 2 * processors and context >= 2 * parts * _PART_TOKENS:
        parts *= 2
    return parts


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
