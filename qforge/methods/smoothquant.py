"""SmoothQuant (Xiao et al., arXiv 2211.10438): divide outlier channels of an input and multiply the weight's columns, so that both can be rounded to 8 bits.

s_c = max|X_c|^a / max|W_c|^(1-a). The paper takes one a, .5, and folds behind norms only. Here every link is a candidate, with an a of its own (or the option
`smoothing`): the one with the least output error of its readers, inputs and weights rounded as their schemes say, over a sample of the calibration tokens;
and it is folded only if that error is less than without. On stories15M with static activation scales, KL divergence .197 becomes .044 with a = .5 everywhere,
.015 with .7, .007 with an a for each link.

Letters: C channels, I input features, O output features, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats
from qforge.methods.transform import Reader, centred, check_activations, per_channel, spread
from qforge.scheme import ScaleType, Scheme

EXPONENTS = tuple(i / 10 for i in range(2, 11))


class SmoothQuant:
    """Factors from the largest magnitudes of inputs and weights."""

    name = "smoothquant"

    def needs(self, options: Options) -> frozenset[str]:
        """The largest inputs, and some inputs to judge by."""
        return frozenset({"absmax", "sample"})

    def supports(self, scheme: Scheme) -> str | None:
        """Schemes that round activations."""
        return "it leaves activations as they are, so that there is nothing to smooth; add, for example, +int8-token" if scheme.activations is None else None

    def factors(self, readers: Sequence[Reader], stats: Stats, columns: torch.Tensor, channels: int, options: Options) -> torch.Tensor:
        """See `Transform.factors`."""
        assert stats.absmax is not None
        check_activations(stats.absmax)
        inputs = per_channel(stats.absmax, columns, channels)
        weights = per_channel(torch.stack([r.weight.abs().amax(0) for r in readers]).amax(0), columns, channels)
        live = (inputs > 0) & (weights > 0)
        one = torch.ones(channels)
        inputs, weights = torch.where(live, inputs, one), torch.where(live, weights, one)
        exponents = EXPONENTS if options.smoothing is None else (options.smoothing,)
        candidates = [one, *(centred(inputs**a / weights ** (1 - a), live) for a in exponents)]
        assert stats.sample is not None
        wanted = [stats.sample @ r.weight.T for r in readers]
        return min(candidates, key=lambda factors: _error(readers, stats, spread(factors, columns), wanted))


def _error(readers: Sequence[Reader], stats: Stats, by_column: torch.Tensor, wanted: Sequence[torch.Tensor]) -> float:
    """Sum of squared output errors over the sample `[S, I]`, whose outputs without rounding are `wanted`, `[S, O]` each."""
    assert stats.sample is not None
    assert stats.absmax is not None
    inputs, largest = stats.sample / by_column, (stats.absmax / by_column).max()
    total = 0.0
    for reader, outputs in zip(readers, wanted, strict=True):
        weight, scheme = reader.weight * by_column, reader.scheme
        q = numerics.quantize(weight, scheme, *scales.choose(weight, scheme, None, search=False), upper=numerics.super_scales(weight, scheme))
        static = None
        if scheme.activations is not None and scheme.activations.static:
            static = numerics.round_scale(numerics.activation_scale(largest, scheme.activations.number), ScaleType.F16BF16)
        rounded = numerics.quantize_activations(inputs, scheme, static)
        total += float((rounded @ numerics.dequantize(q).T - outputs).square().sum())
    return total
