"""Round to nearest: every weight to the closest representable value. Needs no calibration."""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats, check_finite
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class RTN:
    """Round to nearest on range scales. Plain on purpose: it is the yardstick; `options` do not change it."""

    name = "rtn"
    needs: frozenset[str] = frozenset()

    def supports(self, scheme: Scheme) -> str | None:
        """Integers and FP8 with one-level scales."""
        if scheme.scale.super_granularity is not None:
            return f"{scheme}: two-level scales are not available yet"
        if scheme.activations is not None:
            return f"{scheme}: quantized activations are not available yet"
        return None

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, str | None]:
        """See `Quantizer.quantize`."""
        check_finite(weight)
        s, z = scales.choose(weight, scheme, None, search=False)
        return numerics.quantize(weight, scheme, s, z), None
