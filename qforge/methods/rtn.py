"""Round to nearest: every weight to the closest representable value. Needs no calibration, unless ranges are searched."""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats, check_finite
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class RTN:
    """Round to nearest, for every scheme. On range scales it is plain on purpose: the yardstick, which `options` do not change.

    Args:
        name: `rtn`, or the name by which recipes ask for a number type that brings its own scheme (`fp8`, `nf4`), or for a transform and nothing after it (`awq`).
        search: clip ranges where that lowers the squared error, weighted by the inputs' squares (`scales.choose`), unless `options.scale_search` is off.
    """

    def __init__(self, name: str = "rtn", *, search: bool = False) -> None:
        self.name, self._search = name, search

    def needs(self, options: Options) -> frozenset[str]:
        """The Hessian, for its diagonal, where ranges are searched; else nothing."""
        return frozenset({"hessian"} if self._search and options.scale_search else ())

    def supports(self, scheme: Scheme) -> str | None:
        """Every scheme that there is arithmetic for."""
        return numerics.undefined(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, str | None]:
        """See `Quantizer.quantize`."""
        check_finite(weight)
        importance = stats.hessian.diagonal() if stats is not None and stats.hessian is not None else None
        s, z = scales.choose(weight, scheme, importance if self._search else None, search=self._search and options.scale_search)
        return numerics.quantize(weight, scheme, s, z, upper=numerics.super_scales(weight, scheme)), None
