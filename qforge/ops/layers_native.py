"""The native implementation of `LayerOps`: bits do not depend on the batch, the cut of a prompt, the place of blocks, or threads."""

from __future__ import annotations

from typing import Any

import torch

from qforge.ops.layers import AttentionParameters, Batch, LayerCache, TorchLayers, allocate_cache
from qforge.ops.layers import LayerOps as LayerOps
from qforge.ops.native import context, missing, module


class NativeLayers:
    """See `LayerOps`. `x`, `qkv` are contiguous fp32 tensors."""

    name = "native"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        native: Any = module()
        self._native = native
        self._context = context(threads, isa)
        self._activations = {"silu": native.Activation.SILU, "gelu_pytorch_tanh": native.Activation.GELU_TANH}

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps.norm`."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self._context.norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], eps)
        return y

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """See `LayerOps.gate`."""
        x = x.contiguous()
        y = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._context.gate(x.data_ptr(), y.data_ptr(), y.shape[0], y.shape[1], self._activations[activation])
        return y

    def attention(self, qkv: torch.Tensor, a: AttentionParameters, cache: LayerCache, rope: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        """See `LayerOps.attention`."""
        assert qkv.is_contiguous(), qkv.stride()
        out = qkv.new_empty(len(qkv), a.num_heads * a.head_dim)
        q_norm, k_norm = (0 if n is None else n.data_ptr() for n in (a.q_norm, a.k_norm))
        self._context.attention(
            cache.view, qkv.data_ptr(), out.data_ptr(), a.num_heads, a.window, a.scale, q_norm, k_norm, a.norm_eps, rope[0].data_ptr(), rope[1].data_ptr(),
            batch.positions.data_ptr(), batch.slots.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.shape[1], len(qkv), batch.query_starts.data_ptr(),
            len(batch.query_starts) - 1,
        )  # fmt: skip
        return out

    def cache(self, blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
        """See `LayerOps.cache`."""
        keys, values = allocate_cache(blocks, block_size, num_kv_heads, head_dim)
        view = self._native.Cache(keys.data_ptr(), values.data_ptr(), num_kv_heads, head_dim, values.shape[-1], block_size)
        return LayerCache(keys, values, head_dim, view)


def layer_ops(threads: int | None = None) -> LayerOps:
    """The fastest implementation that runs here."""
    return NativeLayers(threads) if missing() is None else TorchLayers()
