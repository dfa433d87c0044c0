"""What a quantization method is: the Quantizer protocol, the statistics that calibration gives it, its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from qforge.clock import Clock
from qforge.errors import NumericalError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Options:
    """Method options from the recipe (`quantize.options`).

    Attributes:
        damping: part of the mean Hessian diagonal that is added to the diagonal; more where calibration has few tokens (`gptq.damping_for`).
        act_order: quantize columns in the order of falling Hessian diagonal, groups staying where they are (no index at run time).
        scale_search: choose scales by smallest weighted squared error instead of by the range.
        error_correction: aim at the outputs of the *unquantized* model, so that a layer makes up for the errors of those before it.
        refine: after the rounding, sweeps of coordinate descent over codes and least squares over scales; 0 for none.
        fisher: weigh a linear's outputs by how much the model's predictions depend on them (`coupled.py`).
        smoothing: SmoothQuant's exponent, the share of the difficulty that moves from inputs into weights; None chooses one for each link.
        steps: SignRound's, for each block.
        tune: steps of tuning all scales together, after the rounding (`calibration/endtoend.py`); 0 for none.
    """

    damping: float = 0.2
    act_order: bool = True
    scale_search: bool = True
    error_correction: bool = True
    refine: int = 3
    fisher: bool = False
    smoothing: float | None = None
    steps: int = 200
    tune: int = 0


@dataclass(slots=True)
class Stats:
    """What calibration saw at the input of one linear (shared by linears with the same input).

    Attributes:
        tokens: rows of x that were summed.
        hessian: `[I, I]` fp32, the sum of x^T x over all tokens (None unless a method needs it).
        cross: `[I, I]` fp32, the sum of (y - x)^T x, y being what the unquantized model has in the place of x.
        residual: `[O, I]` fp32, the sum of r^T x, r being what the unquantized model has more in what this linear's output is added to; None where it is added to nothing.
        absmax: `[I]` fp32, the largest magnitudes.
        sample: `[S, I]` fp32, some rows of x, drawn evenly.
        peak: the largest magnitude in units of the root mean square of all inputs; None where nothing came, or nothing but zeros.
        outputs: `[O, O]`, how this linear's outputs weigh against each other (`calibration/fisher.py`); None where that was not measured.
        factors: results that a method derived from the Hessian, kept for the next linear with the same input.
        clock: where a method that has parts says what each took.
    """

    tokens: int
    hessian: torch.Tensor | None = None
    cross: torch.Tensor | None = None
    absmax: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    peak: float | None = None
    residual: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    factors: dict[object, object] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


class Quantizer(Protocol):
    """One linear at a time.

    Attributes:
        name: as a recipe writes it.
    """

    name: str

    def needs(self, options: Options) -> frozenset[str]:
        """Statistics that `quantize` reads: `hessian`, `cross`, `absmax`, `sample`, `outputs`."""

    def supports(self, scheme: Scheme) -> str | None:
        """None, or why this method cannot produce the scheme."""

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options, reach: float = 0.0) -> tuple[QuantizedLinear, str | None]:
        """Quantize a weight `[O, I]` fp32; the second value is a note for the report, if there is something to say. No `stats`: calibration never reached this linear.

        With a `reach` a scale for all of the weight is made for magnitudes up to that (`numerics.minmax_parameters`): linears that engines fuse have one in common.
        """


def statistics_needed(quantizer: Quantizer, schemes: Iterable[Scheme], options: Options) -> frozenset[str]:
    """Statistics that a method reads, and the largest inputs where activations have a static scale."""
    static = any(s.activations is not None and s.activations.static for s in schemes)
    return quantizer.needs(options) | (frozenset({"absmax"}) if static else frozenset())


def check_finite(weight: torch.Tensor) -> None:
    """Refuse weights with NaN or Inf.

    Raises:
        NumericalError: with the number of such weights.
    """
    if torch.isfinite(weight.sum()):  # one value that is not finite makes the sum so
        return
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise NumericalError(f"{bad} of {weight.numel()} weights are NaN or infinite")
