"""What a transform is: it chooses factors that move difficulty from a link's inputs into its weights (or back) before anything is rounded.

Letters: C channels of a link's source, I input features of its readers, O output features, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from qforge.errors import NumericalError
from qforge.methods.base import Options, Stats
from qforge.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Reader:
    """One linear that a link feeds: its weight `[O, I]` fp32 and its target scheme."""

    weight: torch.Tensor
    scheme: Scheme


class Transform(Protocol):
    """One link at a time.

    Attributes:
        name: as a recipe writes it.
    """

    name: str

    def needs(self, options: Options) -> frozenset[str]:
        """Statistics of the link's input that `factors` reads: `hessian`, `absmax`, `sample`."""

    def supports(self, scheme: Scheme) -> str | None:
        """None, or why factors do nothing for linears of this scheme."""

    def factors(self, readers: Sequence[Reader], stats: Stats, columns: torch.Tensor, channels: int, options: Options) -> torch.Tensor:
        """What the columns are to be multiplied by, `[C]` fp32, positive and finite; ones where that would gain nothing.

        Args:
            readers: all linears of the link; they share one input.
            stats: of this input, before the fold.
            columns: `[I]`, the channel that each column carries; -1 for none.
            channels: C.
            options: of the method.
        """


def scaled(stats: Stats, factors: torch.Tensor) -> Stats:
    """The statistics of an input whose columns were divided by `factors [I]`."""
    return replace(
        stats,
        hessian=None if stats.hessian is None else stats.hessian / factors[:, None] / factors,
        absmax=None if stats.absmax is None else stats.absmax / factors,
        sample=None if stats.sample is None else stats.sample / factors,
        factors={},
    )


def spread(channels: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Values of channels `[C]` at the columns `[I]` that carry them; 1 at the others."""
    return torch.where(columns >= 0, channels[columns.clamp(min=0)], torch.ones(()))


def per_channel(values: torch.Tensor, columns: torch.Tensor, channels: int) -> torch.Tensor:
    """The largest of the values `[I]` over the columns that carry a channel, `[C]`; 0 for a channel that none carries."""
    carried = columns >= 0
    return torch.zeros(channels).scatter_reduce_(0, columns[carried], values[carried], "amax")


def centred(factors: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Factors `[C]` with a geometric mean of 1 over the live channels, within four decades of it; 1 for the others."""
    logs = torch.where(live, factors, torch.ones(())).log()
    logs = torch.where(live, logs - logs.sum() / live.sum().clamp(min=1), torch.zeros(()))
    return logs.clamp(-9.2, 9.2).exp()


def check_activations(amounts: torch.Tensor) -> None:
    """Refuse statistics with NaN or Inf.

    Raises:
        NumericalError: so it is.
    """
    if not torch.isfinite(amounts).all():
        raise NumericalError("the calibration activations are NaN or infinite; the model overflows on this text")
