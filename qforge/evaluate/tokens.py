"""Figures of every scored position of a text, side by side, with the cluster that each belongs to; means and quantiles with their intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qforge.evaluate import statistics
from qforge.evaluate.scores import BEST, PairScores

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns `[positions]`; about 60 bytes a position.

    Attributes:
        probability, probability_reference: of the true token.
        kl: nats.
        common: share of the reference's five most likely tokens that are among the candidate's five.
        right, right_reference: whether the true token was ranked first.
        position: how many tokens lie before it in its window.
        cluster: index of its cluster; clusters are numbered from 0.
        sizes: positions of each cluster, `[clusters]`.
    """

    probability: Floats
    probability_reference: Floats
    kl: Floats
    common: Floats
    right: NDArray[np.bool_]
    right_reference: NDArray[np.bool_]
    position: NDArray[np.int64]
    cluster: NDArray[np.int64]
    sizes: Floats

    @staticmethod
    def of(scores: list[PairScores], owners: list[int]) -> Tokens:
        """From the scores of windows and the cluster of each window."""
        lengths = [len(s.nll) for s in scores]
        cluster = np.repeat(np.asarray(owners, np.int64), lengths)
        return Tokens(
            np.exp(-np.concatenate([s.nll for s in scores])),
            np.exp(-np.concatenate([s.nll_reference for s in scores])),
            np.concatenate([s.kl for s in scores]),
            np.concatenate([s.common for s in scores]) / BEST,
            np.concatenate([s.right for s in scores]),
            np.concatenate([s.right_reference for s in scores]),
            np.concatenate([s.before for s in scores]),
            cluster,
            np.bincount(cluster).astype(np.float64),
        )

    def mean(self, values: ArrayLike) -> statistics.Mean:
        """Mean of one value a position, with its interval."""
        return statistics.mean(np.bincount(self.cluster, weights=np.asarray(values, np.float64)), self.sizes)

    def share(self, having: ArrayLike) -> statistics.Mean:
        """Share of the positions that have something, with its interval; of equal models it is known."""
        return (statistics.share if self.differ() else statistics.mean)(np.bincount(self.cluster, weights=np.asarray(having, np.float64)), self.sizes)

    def differ(self) -> bool:
        """Whether the two models give another distribution anywhere in the text."""
        return bool(np.any(self.kl))
