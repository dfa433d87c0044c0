"""The native layer operations one by one, as tensors: the decoder calls them inside one native step."""

from __future__ import annotations

from typing import Any

import torch

from qforge.ops.layers import AttentionParameters, Batch
from qforge.ops.native_cache import NativeCache
from qforge.ops.native_module import context, module

native: Any = module()
ACTIVATIONS = {"silu": native.Activation.SILU, "gelu_pytorch_tanh": native.Activation.GELU_TANH}


def beginnings(queries: list[int]) -> tuple[Batch, int]:
    """Sequences of which nothing is in the cache yet, with so many queries each, in blocks of 16; and how many blocks these are."""
    counts = [-(-n // 16) for n in queries]
    positions = torch.cat([torch.arange(n) for n in queries])
    tables, first = torch.zeros(len(queries), max(counts), dtype=torch.int32), [0, *torch.tensor(counts).cumsum(0).tolist()]
    for row, i, j in zip(tables, first, first[1:], strict=False):
        row[: j - i] = torch.arange(i, j)
    slots = torch.cat([16 * i + torch.arange(n) for i, n in zip(first, queries, strict=False)])
    return Batch(positions, slots, tables, torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)), first[-1]


class NativeLayers:
    def __init__(self, threads: int, isa: str, kv_cache: str = "fp32") -> None:
        self._threads, self._isa, self._kv_cache = threads, isa, kv_cache

    @property
    def _context(self) -> Any:
        """Not kept: pytest's plugins hold test modules until after the interpreter's exit, where nanobind takes what they hold for leaked."""
        return context(self._threads, self._isa)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        self._context.norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], eps)
        return y

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        y = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._context.gate(x.data_ptr(), y.data_ptr(), y.shape[0], y.shape[1], ACTIVATIONS[activation])
        return y

    def attention(self, qkv: torch.Tensor, a: AttentionParameters, cache: NativeCache, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch, after: Any = None) -> torch.Tensor:
        """`qkv` is overwritten. `after`: a weight that results are rounded for."""
        out = qkv.new_empty(len(qkv), a.num_heads * a.head_dim)
        q_norm, k_norm = (0 if n is None else n.data_ptr() for n in (a.q_norm, a.k_norm))
        self._context.attention(
            cache.layers[0], qkv.data_ptr(), out.data_ptr(), a.num_heads, a.window, a.scale, q_norm, k_norm, a.norm_eps, rope[0].data_ptr(), rope[1].data_ptr(),
            batch.positions.data_ptr(), batch.slots.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1], batch.query_starts.data_ptr(),
            len(batch.query_starts) - 1, after,
        )  # fmt: skip
        return out

    def lines_ahead(self, a: AttentionParameters, cache: NativeCache, layer: int, batch: Batch) -> list[list[int]]:
        """What each thread would bring from the cache, counted from the start of all layers."""
        context = self._context
        context.bring(
            cache.layers[layer], a.num_heads, a.window, batch.positions.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1], batch.query_starts.data_ptr(),
            len(batch.query_starts) - 1,
        )  # fmt: skip
        start = cache._memory.ctypes.data
        lines = [[line - start for line in of_thread] for of_thread in context.lines_ahead()]
        context.bring_nothing()
        return lines

    def cache(self, blocks: int, block_size: int, num_kv_heads: int, head_dim: int, scales: tuple[float, float] | None = None) -> NativeCache:
        return NativeCache(self._kv_cache, blocks, block_size, num_kv_heads, head_dim, [scales])
