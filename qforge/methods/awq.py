"""AWQ (Lin et al., arXiv 2306.00978): scale up the weight columns of strong input channels before rounding, by the power of their magnitude that is best.

Of 20 ratios r = 0, 1/20, .. 19/20, s_c = m_c^r with the smallest loss is taken, m_c being the root mean square of channel c (its mean magnitude in the paper;
the Hessian has the one and not the other). The loss is tr(E H E^T), E = Q(W diag(s)) diag(s)^-1 - W: the squared error of the readers' outputs over all
calibration tokens, exactly, so that no token is run again. It is the block's loss restricted to one link: choosing by the block's own output takes two to three
times as long and gains no divergence (stories15M .0898 for .0856, perplexity 6.641 for 6.726; SmolLM2 .2190 for .2183, 40.98 for 40.25; docs/log.md, 2026-11-23).
Q rounds to nearest with searched (clipped) ranges, or with full ones where `scale_search` is off, as what follows does.

Letters: C channels, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats
from qforge.methods.transform import Reader, centred, check_activations, per_channel, spread
from qforge.scheme import Scheme

RATIOS = 20
ROWS = 512  # of each weight, evenly spaced: rows are independent, and the best ratio is the same for a part of them


class AWQ:
    """Factors from the strength of the inputs, chosen by the error of the outputs."""

    name = "awq"

    def needs(self, options: Options) -> frozenset[str]:
        """The Hessian."""
        return frozenset({"hessian"})

    def supports(self, scheme: Scheme) -> str | None:
        """Every scheme."""
        return None

    def factors(self, readers: Sequence[Reader], stats: Stats, columns: torch.Tensor, channels: int, options: Options) -> torch.Tensor:
        """See `Transform.factors`."""
        assert stats.hessian is not None
        check_activations(stats.hessian.diagonal())
        strength = per_channel(stats.hessian.diagonal() / max(stats.tokens, 1), columns, channels).sqrt()
        live = strength > 0
        some = [Reader(_some_rows(r.weight), r.scheme) for r in readers]
        best, least = torch.ones(channels), float("inf")
        for step in range(RATIOS):
            factors = centred(torch.where(live, strength, torch.ones(())) ** (step / RATIOS), live)
            loss = _loss(some, stats.hessian, spread(factors, columns), search=options.scale_search)
            if loss < least:
                best, least = factors, loss
        return best


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight if len(weight) <= ROWS else weight[torch.linspace(0, len(weight) - 1, ROWS).round().long()]


def _loss(readers: Sequence[Reader], hessian: torch.Tensor, by_column: torch.Tensor, *, search: bool) -> float:
    total = 0.0
    for reader in readers:
        weight = reader.weight * by_column
        scale, zero = scales.choose(weight, reader.scheme, hessian.diagonal() / by_column**2, search=search)
        q = numerics.quantize(weight, reader.scheme, scale, zero, upper=numerics.super_scales(weight, reader.scheme))
        error = numerics.dequantize(q) / by_column - reader.weight
        total += float((error @ hessian * error).sum())
    return total
