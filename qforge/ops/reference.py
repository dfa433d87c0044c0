"""The kernel that runs every scheme everywhere: `numerics.linear` on the unpacked codes."""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class ReferenceKernel:
    """Dequantizes the whole weight at each call: right for every scheme, and slow."""

    name, code = "reference", None

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Everything is supported (see `Kernel.supports`)."""
        return None

    def prepack(self, q: QuantizedLinear) -> QuantizedLinear:
        """The linear as it is."""
        return q

    def run(self, x: torch.Tensor, packed: QuantizedLinear) -> torch.Tensor:
        """See `numerics.linear`."""
        return numerics.linear(x, packed)
