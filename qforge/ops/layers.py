"""What a decoder layer does between its products (norm, rotary embedding, paged attention, gated activation), in plain PyTorch: the reference of kernels/include/qforge/layers.h.

Letters: T tokens of a step, S sequences, H query heads, K key/value heads, D head size, B cache blocks, P positions, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qforge import numerics
from qforge.ops.native_cache import LANES, Scales
from qforge.scheme import Granularity, Number, Per, Scheme

_FP8 = Scheme(Number.FP8_E4M3, Granularity(Per.TENSOR))


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Keys and values of one layer (kernels/include/qforge/layers.h): fp32, or codes of E4M3.

    Attributes:
        keys: `[B, K, block_size / 16, D, 16]`.
        values: `[B, K, block_size, D up to a multiple of 16]`.
        scales: of all keys and all values, where they are codes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    head_dim: int
    scales: Scales | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.values.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParameters:
    """What one layer's attention is: heads, window (0: none; else positions seen, the query's own included), scale, and q/k norms with their epsilon.

    `q_norm` and `k_norm` are `[D]`, for each head by itself, or with `whole_norms` `[H D]` and `[K D]`, over all heads at once.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scale: float
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 0.0
    whole_norms: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Where the tokens of a step stand: positions and slots `[T]` int64, block tables `[S, *]` int32, query starts `[S + 1]` int32."""

    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor


class TorchLayers:
    """Right everywhere, one sequence at a time; all tensors fp32 and contiguous. Bits may depend on how a prompt is cut into steps (matrix products of other shapes)."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Root mean square norm of `x [T, W]`, times `weight [W]`; x itself without a weight."""
        return x if weight is None else weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """`x [T, 2 W]`: act(first half) * second half, `[T, W]`; activation is `silu` or `gelu_pytorch_tanh`."""
        gate, up = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")) * up

    def attention(self, qkv: torch.Tensor, a: AttentionParameters, cache: LayerCache, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Norm and rotate queries and keys of `qkv [T, (H + 2 K) D]`, write keys and values to the cache, attend causally: `[T, H D]`.

        `rope`: cosines and sines `[P, D / 2]`.
        """
        heads = qkv.view(len(qkv), -1, a.head_dim)
        q, k, v = torch.split(heads, [a.num_heads, a.num_kv_heads, a.num_kv_heads], 1)
        if a.q_norm is not None and a.k_norm is not None:
            across = (1, 2) if a.whole_norms else (2, 2)
            q, k = (self.norm(x.flatten(*across), weight, a.norm_eps).view_as(x) for x, weight in ((q, a.q_norm), (k, a.k_norm)))
        cos, sin = (t[batch.positions].unsqueeze(1) for t in rope)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
        cache.keys[block, :, offset // LANES, :, offset % LANES] = k if cache.scales is None else _codes(k, cache.scales[0])
        cache.values[block, :, offset, : a.head_dim] = v if cache.scales is None else _codes(v, cache.scales[1])
        starts = batch.query_starts.tolist()
        parts = [_attend(q[i:j], batch.positions[i:j], table, a, cache) for i, j, table in zip(starts, starts[1:], batch.block_tables, strict=False)]
        return torch.cat(parts).reshape(len(qkv), -1)

    def cache(self, blocks: int, block_size: int, num_kv_heads: int, head_dim: int, scales: Scales | None = None) -> LayerCache:
        """An empty cache of one layer, of FP8 E4M3 where `scales` are given; memory is taken from the system only when a page is first written."""
        assert block_size % LANES == 0, block_size
        wide, dtype = -(-head_dim // LANES) * LANES, np.float32 if scales is None else np.uint8
        keys = np.zeros((blocks, num_kv_heads, block_size // LANES, head_dim, LANES), dtype)
        return LayerCache(torch.from_numpy(keys), torch.from_numpy(np.zeros((blocks, num_kv_heads, block_size, wide), dtype)), head_dim, scales)


def _codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    return numerics.encode(x, torch.tensor(scale), None, _FP8)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attend(q: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, a: AttentionParameters, cache: LayerCache) -> torch.Tensor:
    """`q [t, H, D]` of one sequence -> `[t, H, D]`."""
    context = int(positions[-1]) + 1
    blocks = table[: -(-context // cache.block_size)].long()
    k = cache.keys[blocks].permute(1, 0, 2, 4, 3).reshape(a.num_kv_heads, -1, a.head_dim)[:, :context]
    v = cache.values[blocks].transpose(0, 1).reshape(a.num_kv_heads, -1, cache.values.shape[-1])[:, :context, : a.head_dim]
    place = torch.arange(context)
    seen = place <= positions[:, None]
    if a.window:
        seen &= place > positions[:, None] - a.window
    if cache.scales is not None:
        k, v = (numerics.decode(codes, torch.tensor(scale), None, _FP8) for codes, scale in zip((k, v), cache.scales, strict=True))
    y = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=seen, scale=a.scale, enable_gqa=True)
    return y[0].transpose(0, 1)
