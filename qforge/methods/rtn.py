"""Round to nearest: every weight to the closest representable value.

`rtn` needs no calibration: scales have the least squared rounding error (`scales.choose`), or with `options.scale_search` off that of the full range, the plain
yardstick. KL divergence of stories15M, int4 group 32: .157 plain, .115 searched. Codes of eight bits take the full range: a search without the inputs' weights lowers the
error by .3 % (integers) or 2 % (FP8), and clips what a few large activations depend on (SmolLM2 after SmoothQuant, int8: KL divergence .030 searched, .011 plain).
"""

from __future__ import annotations

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats, check_finite
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class RTN:
    """Round to nearest, for every scheme.

    Args:
        name: `rtn`, or the name by which recipes ask for a number type that brings its own scheme (`fp8`, `nf4`), or for a transform and nothing after it (`awq`).
        search: choose scales by squared error, unless `options.scale_search` is off; else by the range.
        weighted: that error is weighted by the inputs' squares, from calibration.
    """

    def __init__(self, name: str = "rtn", *, search: bool = True, weighted: bool = False) -> None:
        self.name, self._search, self._weighted = name, search, weighted

    def needs(self, options: Options) -> frozenset[str]:
        """The Hessian, for its diagonal, where the search is weighted; else nothing."""
        return frozenset({"hessian"} if self._weighted and options.scale_search else ())

    def supports(self, scheme: Scheme) -> str | None:
        """Every scheme that there is arithmetic for."""
        return numerics.undefined(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options, reach: float = 0.0) -> tuple[QuantizedLinear, str | None]:
        """See `Quantizer.quantize`."""
        check_finite(weight)
        search = self._search and options.scale_search and (self._weighted or scheme.bits < 8)
        importance = stats.hessian.diagonal() if self._weighted and stats is not None and stats.hessian is not None else None
        s, z = scales.choose(weight, scheme, importance, search, reach)
        return numerics.quantize(weight, scheme, s, z, upper=numerics.super_scales(weight, scheme, reach)), None
