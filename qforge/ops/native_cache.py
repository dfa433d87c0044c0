"""The paged key/value cache of one layer as the native kernels have it (kernels/include/qforge/layers.h), in fp32, fp16, bf16 or int8."""

from __future__ import annotations

from typing import Any

import numpy as np

from qforge.ops.native_module import module

LANES = 16  # positions side by side in the key cache; a block holds a multiple of this many tokens
CACHE_TYPES: dict[str, tuple[str, type[Any]]] = {"fp32": ("F32", np.float32), "fp16": ("F16", np.float16), "bf16": ("BF16", np.uint16), "int8": ("I8", np.int8)}


def bytes_per_token(kind: str, num_kv_heads: int, head_dim: int) -> int:
    """Bytes that one token takes in one layer."""
    wide = -(-head_dim // LANES) * LANES
    return num_kv_heads * ((head_dim + wide) * np.dtype(CACHE_TYPES[kind][1]).itemsize + (8 if kind == "int8" else 0))


class NativeCache:
    """Empty at first; memory is taken from the system only when a page is first written.

    Attributes:
        view: the native view, valid as long as this object lives.
    """

    def __init__(self, kind: str, blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        assert block_size % LANES == 0, block_size
        assert kind != "int8" or head_dim <= 512, f"sums of {head_dim} products of 8 and 16 bits do not fit 32"
        name, dtype = CACHE_TYPES[kind]
        wide = -(-head_dim // LANES) * LANES
        native: Any = module()
        rows = (blocks, num_kv_heads, block_size)
        self._keys, self._values = np.zeros((*rows, head_dim), dtype), np.zeros((*rows, wide), dtype)
        self._scales = [np.zeros(rows, np.float32) for _ in range(2)] if kind == "int8" else []
        scales = [a.ctypes.data for a in self._scales] or [0, 0]
        self.view = native.Cache(getattr(native.CacheType, name), self._keys.ctypes.data, self._values.ctypes.data, *scales, num_kv_heads, head_dim, wide, block_size)
