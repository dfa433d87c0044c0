"""One linear: quantized by a method, given its input scale, and measured.

Letters: O output features, I input features.
"""

from __future__ import annotations

import torch

from qforge import numerics
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
    peak = weight.abs().max().clamp(min=1e-30)  # squares of what is left are within fp32's range, whatever the weights are
    wrong, right = error / peak, weight / peak
    relative = float(wrong.norm() / right.norm().clamp(min=1e-30))
    output = None
    if stats is not None and stats.hessian is not None:
        strength = stats.hessian.diagonal().max().clamp(min=1e-30).sqrt()
        parts = [(m / strength @ stats.hessian * (m / strength)).sum().clamp(min=0) for m in (wrong, right)]
        output = float((parts[0] / parts[1].clamp(min=1e-30)).sqrt())
    bits = scheme.storage_bits(*weight.shape) / weight.numel()
    seen = (None, None) if stats is None else (stats.tokens, stats.peak)
    return q, LayerResult(name, str(scheme), relative, output, bits, note, *seen)
