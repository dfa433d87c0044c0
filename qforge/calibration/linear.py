"""One linear: quantized by a method, given its input scale, and measured.

Letters: O output features, I input features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.precision import factor, multiply
from qforge.calibration.ranges import with_input_scale
from qforge.errors import NumericalError
from qforge.methods import Options, Quantizer, Stats
from qforge.methods.transform import check_activations
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import LayerResult


def quantize_linear(
    name: str, weight: torch.Tensor, scheme: Scheme, quantizer: Quantizer, stats: Stats | None, options: Options, reach: float = 0.0
) -> tuple[QuantizedLinear, LayerResult]:  # fmt: skip
    """Quantize one weight `[O, I]` and measure what that did: relative Frobenius error of the weight and, with a Hessian, of the output. `reach`: see `reaches`.

    Raises:
        NumericalError: no sound result can be computed; the message names the layer.
    """
    try:
        if stats is not None and stats.hessian is not None:
            check_activations(stats.hessian.diagonal())
        q, note = quantizer.quantize(weight, scheme, stats, options, reach)
        q = with_input_scale(q, None if stats is None else stats.absmax)
        error = numerics.dequantize(q) - weight
        if not error.isfinite().all():
            raise NumericalError(f"weights as large as {float(weight.abs().max()):.3g} overflow fp32 while they are rounded; leave this layer unquantized")
    except NumericalError as e:
        raise NumericalError(f"{name}: {e}") from e
    relative, output = _relative(error, weight, None if stats is None else stats.hessian)
    bits = scheme.storage_bits(*weight.shape) / weight.numel()
    seen = (None, None) if stats is None else (stats.tokens, stats.peak)
    return q, LayerResult(name, str(scheme), relative, output, bits, note, *seen)


def relative_error(q: QuantizedLinear, weight: torch.Tensor) -> float:
    """The relative Frobenius error of a linear to its weight `[O, I]` fp32."""
    return _relative(numerics.dequantize(q) - weight, weight, None)[0]


def reaches(linears: Mapping[str, nn.Linear], schemes: Mapping[str, Scheme], *, corrected: bool) -> dict[str, float]:
    """The magnitude that one scale for all of each weight is made for, by name, where an engine may fuse a linear with others: with all of a module that take as many inputs and
    have the same scheme. So query, key and value projections, and gate and up projections of an MLP or of each expert, have equal scales. That an output projection as wide as
    them is among these costs nothing: in formats of floats a scale that is larger than it need be takes no digit from any but the smallest numbers.

    Args:
        linears: of one block, before any is quantized.
        schemes: by name.
        corrected: whether weights change before they are rounded; twice the magnitude then, and what is larger still is clipped.
    """
    groups: dict[tuple[str, int, Scheme], list[str]] = {}
    for name, linear in linears.items():
        if numerics.has_common_scale(schemes[name]):
            groups.setdefault((name.rpartition(".")[0], linear.in_features, schemes[name]), []).append(name)
    found: dict[str, float] = {}
    for names in groups.values():
        if len(names) > 1:
            tops = [max(abs(float(end)) for end in torch.aminmax(linears[n].weight.detach())) for n in names]
            reach = max((top for top in tops if math.isfinite(top)), default=0.0)
            found |= dict.fromkeys(names, 2 * reach if corrected else reach)
    return found


def _relative(error: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor | None) -> tuple[float, float | None]:
    """Of an error `[O, I]`, used up, to its weight: the ratio of Frobenius norms, and that of the outputs' where there is a Hessian."""
    peak = weight.abs().max().clamp(min=1e-30)  # squares of what is left are within fp32's range, whatever the weights are
    parts = error.div_(peak), weight / peak
    wrong, right = (p.norm() for p in parts)
    relative = float(wrong / right.clamp(min=1e-30))
    if hessian is None:
        return relative, None
    strength, factored = hessian.diagonal().max().clamp(min=1e-30).sqrt(), factor(hessian)
    wrong, right = (torch.linalg.vecdot(multiply(p.div_(strength), factored, None).reshape(-1), p.reshape(-1)).clamp(min=0) for p in parts)
    return relative, float((wrong / right.clamp(min=1e-30)).sqrt())
