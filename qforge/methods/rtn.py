"""Round to nearest: every weight to the closest representable value. Needs no calibration."""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats, check_finite
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class RTN:
    """Round to nearest on range scales, for every scheme. Plain on purpose: it is the yardstick; `options` do not change it.

    Args:
        name: `rtn`, or the name by which recipes ask for a number type that brings its own scheme (`fp8`, `nf4`).
    """

    def __init__(self, name: str = "rtn") -> None:
        self.name = name

    def needs(self, options: Options) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def supports(self, scheme: Scheme) -> str | None:
        """Every scheme that there is arithmetic for."""
        return numerics.undefined(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, str | None]:
        """See `Quantizer.quantize`."""
        check_finite(weight)
        s, z = scales.choose(weight, scheme, None, search=False)
        return numerics.quantize(weight, scheme, s, z, upper=numerics.super_scales(weight, scheme)), None
