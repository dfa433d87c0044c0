"""What a kernel for quantized linears offers."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class Kernel(Protocol):
    """One implementation of `numerics.linear`.

    Attributes:
        name: as `inspect`, `doctor` and reports print it.
        code: the instruction set that its code is written for, of those that this CPU runs; None where it is not ours to say.
    """

    name: str

    @property
    def code(self) -> str | None:
        """The instruction set of this kernel's code on this CPU, or None."""

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """None if the kernel runs a weight `[O, I]` of this scheme on this device; otherwise the reason why not."""

    def prepack(self, q: QuantizedLinear) -> Any:
        """The weight in the kernel's own layout, bias included."""

    def run(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """`x [T, I] -> [T, O]`, both fp32; on a GPU both in x's dtype."""
