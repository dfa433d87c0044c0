"""Static activation scales: from the largest magnitudes that calibration saw at a linear's input.

Letters: I input features.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qforge import numerics
from qforge.errors import NumericalError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import ScaleType


def with_input_scale(q: QuantizedLinear, absmax: torch.Tensor | None) -> QuantizedLinear:
    """The same linear with the input scale that its scheme needs, if it needs one: that of the largest magnitude, exact in fp16 and bf16 as every format stores it.

    Args:
        q: as a method made it.
        absmax: `[I]` fp32, the largest magnitude of each input feature over the calibration text; None where calibration never reached this linear.

    Raises:
        NumericalError: there is no such statistic, or it is not finite or beyond what fp16 scales hold.
    """
    if q.scheme.activations is None or not q.scheme.activations.static:
        return q
    if absmax is None:
        raise NumericalError("calibration never reached this layer, so that its static activation scale is unknown; override its scheme with dynamic activations (+int8-token)")
    largest = absmax.max()
    if not torch.isfinite(largest):
        raise NumericalError("the calibration activations are NaN or infinite; the model overflows on this text")
    scale = numerics.activation_scale(largest, q.scheme.activations.number)
    return replace(q, input_scale=numerics.round_scale(scale, ScaleType.F16BF16))
