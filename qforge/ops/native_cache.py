"""The paged key/value cache of one layer as the native kernels have it (kernels/include/qforge/layers.h), in fp32, fp16, bf16, int8 or fp8 (E4M3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from qforge.ops.native_module import module

LANES = 16  # positions side by side in the key cache; a block holds a multiple of this many tokens
CACHE_TYPES: dict[str, tuple[str, type[Any]]] = {
    "fp32": ("F32", np.float32),
    "fp16": ("F16", np.float16),
    "bf16": ("BF16", np.uint16),
    "int8": ("I8", np.int8),
    "fp8": ("F8", np.uint8),
}
Scales = tuple[float, float]  # of all keys and of all values of a layer


def bytes_per_token(kind: str, num_kv_heads: int, head_dim: int, *, calibrated: bool = False) -> int:
    """Bytes that one token takes in one layer; where scales are `calibrated`, fp8 keeps none for each key and value."""
    wide = -(-head_dim // LANES) * LANES
    return num_kv_heads * ((head_dim + wide) * np.dtype(CACHE_TYPES[kind][1]).itemsize + (8 if _scaled_singly(kind, calibrated) else 0))


def _scaled_singly(kind: str, calibrated: bool) -> bool:
    return kind == "int8" or (kind == "fp8" and not calibrated)


class NativeCache:
    """Empty at first; memory is taken from the system only when a page is first written.

    Args:
        scales: of fp8; None: each key and each value gets one of its own, as in int8.

    Attributes:
        view: the native view, valid as long as this object lives.
    """

    def __init__(self, kind: str, blocks: int, block_size: int, num_kv_heads: int, head_dim: int, scales: Scales | None = None) -> None:
        assert block_size % LANES == 0, block_size
        assert kind != "int8" or head_dim <= 512, f"sums of {head_dim} products of 8 and 16 bits do not fit 32"
        name, dtype = CACHE_TYPES[kind]
        wide = -(-head_dim // LANES) * LANES
        native: Any = module()
        rows = (blocks, num_kv_heads, block_size)
        self._keys, self._values = np.zeros((*rows, head_dim), dtype), np.zeros((*rows, wide), dtype)
        self._scales = [np.zeros(rows, np.float32) for _ in range(2)] if _scaled_singly(kind, scales is not None) else []
        singly = [a.ctypes.data for a in self._scales] or [0, 0]
        of_layer = scales if kind == "fp8" and scales is not None else (1.0, 1.0)
        self.view = native.Cache(getattr(native.CacheType, name), self._keys.ctypes.data, self._values.ctypes.data, *singly, num_kv_heads, head_dim, wide, block_size, *of_layer)
