"""Launch norms and gated activations.

Letters: T tokens, I features.
"""

from __future__ import annotations

import torch

from qforge.ops.triton.cache import LIMITS
from qforge.ops.triton.products import RoundedRows

_BLOCK = 1024


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None, rounded: torch.dtype | None = None) -> torch.Tensor | RoundedRows:
    """`x [T, I] / rms(x) x weight`, in x's dtype or rounded to int8 or float8_e4m3fn by token. A residual `[T, I]` is added to x first, and holds the sum afterwards."""
    from qforge.ops.triton.device.pointwise import rms_norm as kernel

    y = torch.empty(x.shape, dtype=rounded or x.dtype, device=x.device)
    scales = None if rounded is None else torch.empty((len(x), 1), device=x.device)
    block = 1 << (x.shape[1] - 1).bit_length()
    kernel[(len(x),)](
        x.contiguous(), residual, weight, y, scales, x.shape[1], epsilon, ADD=residual is not None, LIMIT=0.0 if rounded is None else LIMITS[rounded],
        INT=rounded == torch.int8, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return y if scales is None else RoundedRows(y, scales)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 I] -> [T, I]`: silu of the first half times the second."""
    from qforge.ops.triton.device.pointwise import silu_mul as kernel

    columns = gate_up.shape[1] // 2
    y = gate_up.new_empty((len(gate_up), columns))
    kernel[(len(gate_up), -(-columns // _BLOCK))](gate_up.contiguous(), y, columns, BLOCK=_BLOCK, num_warps=4)
    return y
