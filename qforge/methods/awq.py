"""AWQ (Lin et al., arXiv 2306.00978): scale up the weight columns of strong input channels before rounding, by the power of their magnitude that is best.

Of 20 ratios r = 0, 1/20, .. 19/20, s_c = m_c^r with the smallest loss is taken, m_c being the root mean square of channel c (its mean magnitude in the paper;
the Hessian has the one and not the other). A first loss is tr(E H E^T), E = Q(W diag(s)) diag(s)^-1 - W: the squared error of the readers' outputs over all
calibration tokens, exactly, without running any of them again. Of the ratios where it is least, the one is taken that changes the block's output least on some of
the tokens, with only the readers rounded. Q rounds to nearest with searched (clipped) ranges.

Letters: C channels, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qforge import numerics
from qforge.methods import scales
from qforge.methods.base import Options, Stats
from qforge.methods.transform import BlockLoss, Reader, centred, check_activations, per_channel, spread
from qforge.scheme import Scheme

RATIOS = 20
TRIED = 4  # in the block
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

    def factors(self, readers: Sequence[Reader], stats: Stats, columns: torch.Tensor, channels: int, options: Options, block_loss: BlockLoss) -> torch.Tensor:
        """See `Transform.factors`."""
        assert stats.hessian is not None
        hessian = stats.hessian
        check_activations(hessian.diagonal())
        strength = per_channel(hessian.diagonal() / max(stats.tokens, 1), columns, channels).sqrt()
        live = strength > 0
        candidates = [centred(torch.where(live, strength, torch.ones(())) ** (step / RATIOS), live) for step in range(RATIOS)]
        some = [Reader(_some_rows(r.weight), r.scheme) for r in readers]
        candidates.sort(key=lambda factors: sum(_loss(r, hessian, spread(factors, columns)) for r in some))
        return min(candidates[:TRIED], key=lambda factors: block_loss([_rounded(r, hessian, spread(factors, columns)) for r in readers]))


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight if len(weight) <= ROWS else weight[torch.linspace(0, len(weight) - 1, ROWS).round().long()]


def _loss(reader: Reader, hessian: torch.Tensor, by_column: torch.Tensor) -> float:
    error = _rounded(reader, hessian, by_column) - reader.weight
    return float((error @ hessian * error).sum())


def _rounded(reader: Reader, hessian: torch.Tensor, by_column: torch.Tensor) -> torch.Tensor:
    """The weight as it acts on inputs that are not divided."""
    weight = reader.weight * by_column
    scale, zero = scales.choose(weight, reader.scheme, hessian.diagonal() / by_column**2, search=True)
    q = numerics.quantize(weight, reader.scheme, scale, zero, upper=numerics.super_scales(weight, reader.scheme))
    return numerics.dequantize(q) / by_column
