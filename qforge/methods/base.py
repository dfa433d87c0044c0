"""What a quantization method is: the Quantizer protocol, the statistics that calibration gives it, its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from qforge.errors import NumericalError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Options:
    """Method options from the recipe (`quantize.options`).

    Attributes:
        damping: part of the mean Hessian diagonal that is added to the diagonal.
        act_order: quantize columns in the order of falling Hessian diagonal, groups staying where they are (no index at run time).
        scale_search: choose scales by smallest weighted squared error instead of by the range.
    """

    damping: float = 0.01
    act_order: bool = True
    scale_search: bool = True


@dataclass(slots=True)
class Stats:
    """What calibration saw at the input of one linear (shared by linears with the same input).

    Attributes:
        tokens: rows of x that were summed.
        hessian: `[I, I]` fp32, the sum of x^T x over all tokens (None unless a method needs it).
        factors: results that a method derived from the Hessian, kept for the next linear with the same input.
    """

    tokens: int
    hessian: torch.Tensor | None = None
    factors: dict[object, object] = field(default_factory=dict)


class Quantizer(Protocol):
    """One linear at a time.

    Attributes:
        name: as a recipe writes it.
        needs: statistics that `quantize` reads (`hessian`).
    """

    name: str
    needs: frozenset[str]

    def supports(self, scheme: Scheme) -> str | None:
        """None, or why this method cannot produce the scheme."""

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, str | None]:
        """Quantize a weight `[O, I]` fp32; the second value is a note for the report, if there is something to say."""


def check_finite(weight: torch.Tensor) -> None:
    """Refuse weights with NaN or Inf.

    Raises:
        NumericalError: with the number of such weights.
    """
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise NumericalError(f"{bad} of {weight.numel()} weights are NaN or infinite")
