"""One linear: quantized by a method, given its input scale, and measured.

Letters: O output features, I input features.
"""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.calibration.precision import factor, multiply
from qforge.calibration.ranges import with_input_scale
from qforge.errors import NumericalError
from qforge.methods import Options, Quantizer, Stats
from qforge.methods.transform import check_activations
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import LayerResult


def quantize_linear(name: str, weight: torch.Tensor, scheme: Scheme, quantizer: Quantizer, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, LayerResult]:
    """Quantize one weight `[O, I]` and measure what that did: relative Frobenius error of the weight and, with a Hessian, of the output.

    Raises:
        NumericalError: no sound result can be computed; the message names the layer.
    """
    try:
        if stats is not None and stats.hessian is not None:
            check_activations(stats.hessian.diagonal())
        q, note = quantizer.quantize(weight, scheme, stats, options)
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
