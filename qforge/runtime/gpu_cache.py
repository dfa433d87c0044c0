"""The key/value cache on a GPU: which types it may have, how large it is, and how many blocks a card has room for."""

from __future__ import annotations

import torch

from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.ops.triton.present import capability, interpreted

TYPES: dict[str, torch.dtype | None] = {"fp16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}  # None: the type of activations
_FLOAT8 = 89  # the first compute capability with e4m3
_MARGIN = 0.08  # of the card, for activations, recorded graphs and torch itself


def stored(kind: str | None, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a cache that a user calls `kind`, for activations of `dtype`; None: as these.

    Raises:
        UnsupportedError: it is not known.
        MissingCapabilityError: this card does not have it.
    """
    if kind is not None and kind not in TYPES:
        raise UnsupportedError(f"a key/value cache of '{kind}' is not kept on a GPU; use one of {', '.join(TYPES)}")
    wanted = TYPES["fp16" if kind is None else kind] or dtype
    if wanted is torch.float8_e4m3fn and not has_float8(device):
        raise MissingCapabilityError("a key/value cache of 'fp8' needs a GPU of compute capability 8.9 or later; use int8")
    return wanted


def has_float8(device: torch.device) -> bool:
    """Whether a card has e4m3."""
    return interpreted() or capability(device) >= _FLOAT8


def bytes_per_token(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> int:
    """Bytes that one token takes in one layer: key, value, and their scales where they have 8 bits."""
    return 2 * num_kv_heads * (head_dim * dtype.itemsize + (4 if dtype.itemsize == 1 else 0))


def room(device: torch.device) -> int:
    """Bytes that a cache may take on a card that holds its weights already."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(_MARGIN * total))
