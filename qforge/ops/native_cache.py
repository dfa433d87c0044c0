"""The paged key/value cache as the native kernels have it (kernels/include/qforge/layers.h), in fp32, fp16, bf16, int8 or fp8 (E4M3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qforge.ops.native_module import module
from qforge.ops.pages import anonymous

LONGEST_INTEGER_HEAD = 512  # dimensions that int8 keys are turned in (kLongestIntegerHead)
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
    """Of all layers. Empty at first; memory is taken from the system only when a page is first written.

    Args:
        scales: of each layer, for fp8; None: each key and each value gets one of its own, as in int8.

    Attributes:
        layers: the native view of each, valid as long as this object lives.

    Raises:
        OSError, OverflowError, ValueError: the system has less memory.
    """

    def __init__(self, kind: str, blocks: int, block_size: int, num_kv_heads: int, head_dim: int, scales: Sequence[Scales | None] = (None,)) -> None:
        assert block_size % LANES == 0, block_size
        assert kind != "int8" or head_dim <= LONGEST_INTEGER_HEAD, head_dim
        native: Any = module()
        type_of = getattr(native.CacheType, CACHE_TYPES[kind][0])
        calibrated = [kind == "fp8" and s is not None for s in scales]
        sizes = [block_size * bytes_per_token(kind, num_kv_heads, head_dim, calibrated=c) for c in calibrated]
        self._memory = np.frombuffer(anonymous(max(1, blocks * sum(sizes))), np.uint8)
        starts = (self._memory.ctypes.data + sum(sizes[:i]) for i in range(len(sizes)))
        self.layers = [
            native.Cache(type_of, start, sum(sizes), num_kv_heads, head_dim, block_size, _scaled_singly(kind, c), *(s if c and s else (1.0, 1.0)))
            for start, s, c in zip(starts, scales, calibrated, strict=True)
        ]
