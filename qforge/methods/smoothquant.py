"""SmoothQuant (Xiao et al., arXiv 2211.10438): divide outlier channels of an input and multiply the weight's columns, so that both can be rounded to 8 bits.

s_c = max|X_c|^a / max|W_c|^(1-a), with a the option `smoothing`. The paper folds behind norms only. Here every link is a candidate, and each is folded only if
that lowers the output error of its readers, with inputs and weights rounded as their schemes say, over a sample of the calibration tokens.

Letters: C channels, I input features, O output features, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats
from qforge.methods.transform import Reader, centred, check_activations, per_channel
from qforge.scheme import ScaleType, Scheme


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
        smooth = torch.where(live, inputs, one).log() * options.smoothing - torch.where(live, weights, one).log() * (1 - options.smoothing)
        factors = centred(smooth.exp(), live)
        return factors if _error(readers, stats, factors, columns) < _error(readers, stats, one, columns) else one


def _error(readers: Sequence[Reader], stats: Stats, factors: torch.Tensor, columns: torch.Tensor) -> float:
    """Sum of squared output errors over the sample `[S, I]`."""
    assert stats.sample is not None
    assert stats.absmax is not None
    by_column = torch.where(columns >= 0, factors[columns.clamp(min=0)], torch.ones(()))
    inputs, largest = stats.sample / by_column, (stats.absmax / by_column).max()
    total = 0.0
    for reader in readers:
        weight, scheme = reader.weight * by_column, reader.scheme
        q = numerics.quantize(weight, scheme, *scales.choose(weight, scheme, None, search=False), upper=numerics.super_scales(weight, scheme))
        static = None
        if scheme.activations is not None and scheme.activations.static:
            static = numerics.round_scale(numerics.activation_scale(largest, scheme.activations.number), ScaleType.F16BF16)
        rounded = numerics.quantize_activations(inputs, scheme, static)
        total += float((rounded @ numerics.dequantize(q).T - stats.sample @ reader.weight.T).square().sum())
    return total
