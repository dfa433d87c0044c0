"""Two models' logits for the same windows -> figures of each scored position, in memory of one chunk of logits from each.

Letters: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qforge.engines.base import Scorer
from qforge.errors import NumericalError, UnsupportedError
from qforge.types import Guess, WorstToken

PADDING_MASS = 1e-3
WORST = 20
SHOWN = 3  # of each model's most likely tokens beside a bad position
BEST = 5


@dataclass(frozen=True, slots=True)
class WindowScores:
    """Negative log-likelihood of the true tokens under the candidate, fp64 `[positions]` in nats, for one window's scored positions."""

    nll: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairScores(WindowScores):
    """The same beside a reference, `[positions]` each.

    Attributes:
        nll_reference: the reference's, fp64.
        kl: KL(reference || candidate) in nats, fp64.
        agree: whether both rank the same token first.
        common: how many of the reference's five most likely tokens are among the candidate's five, int8.
        right, right_reference: whether the candidate, the reference, ranks the true token first.
        worst: the positions with the largest divergence, at most 20, largest first.
    """

    nll_reference: NDArray[np.float64]
    kl: NDArray[np.float64]
    agree: NDArray[np.bool_]
    common: NDArray[np.int8]
    right: NDArray[np.bool_]
    right_reference: NDArray[np.bool_]
    worst: list[WorstToken]


def score_windows(candidate: Scorer, reference: Scorer | None, ids: list[list[int]]) -> Iterator[WindowScores]:
    """Yield the scores of each window, `PairScores` beside a reference. Both models' chunks are read in step; none is kept.

    Raises:
        NumericalError: a model gives NaN or infinite logits.
        UnsupportedError: the models do not share a vocabulary.
    """
    ours = candidate.score(ids)
    theirs = None if reference is None else reference.score(ids)
    for index, window in enumerate(ids):
        alone: list[WindowScores] = []
        pairs: list[PairScores] = []
        start, length = 0, len(window) - 1
        while start < length:
            a = next(ours)
            assert a.shape[0] <= length - start, f"{candidate.name} yields a chunk of {a.shape[0]} positions where {length - start} are left in the window"
            targets = torch.tensor(window[start + 1 : start + 1 + a.shape[0]], device=a.device)
            place = f"window {index}, positions {start}..{start + a.shape[0] - 1}"
            if theirs is None or reference is None:
                alone.append(WindowScores(_nll(_Row(a, targets, f"{candidate.name}: {place}"))))
            else:
                pairs.append(_pair(a, next(theirs), targets, (candidate, reference), place, (index, start + 1)))
            start += a.shape[0]
        yield _joined(pairs) if pairs else WindowScores(np.concatenate([part.nll for part in alone]))


class _Row:
    """Softmax of a chunk of logits `[C, V]`, fp32 exponentials summed in fp64, and the true tokens `[C]`."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor, place: str) -> None:
        if int(targets.max()) >= logits.shape[1]:
            raise UnsupportedError(
                f"{place}: token {int(targets.max())} is outside of this model's vocabulary of {logits.shape[1]}; the text was cut with another model's tokenizer"
            )
        self.logits, self.targets = logits.float(), targets
        self.top, self.best = self.logits.max(-1)
        self.shifted = self.logits - self.top[:, None]
        self.exp = self.shifted.exp()
        self.total = self.exp.sum(-1, dtype=torch.float64)
        if not bool(torch.isfinite(self.shifted.sum())) or not bool(torch.isfinite(self.total).all()):
            self._refuse(place)

    def _refuse(self, place: str) -> None:
        bad = ~torch.isfinite(self.logits)
        row = int(bad.any(-1).nonzero()[0]) if bool(bad.any()) else 0
        raise NumericalError(f"{place}: {int(bad.sum())} of {bad.numel()} logits are NaN or infinite (first in position {row} of these); this model cannot be scored")


def _nll(row: _Row) -> NDArray[np.float64]:
    true = row.logits.gather(-1, row.targets[:, None])[:, 0].double()
    return _numpy(row.total.log() + (row.top.double() - true))


def _pair(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor, scorers: tuple[Scorer, Scorer], place: str, origin: tuple[int, int]) -> PairScores:
    """Figures of candidate logits `a` beside reference logits `b`, both `[C, V]`. `origin`: the window's index and how many tokens lie before the first of `targets`.

    KL = sum p_i (y_i - x_i) - (log Z_y - log Z_x) with y the reference's logits, x the candidate's: products in fp32, sums in fp64; within 1e-6 of a plain fp64 computation.
    """
    assert a.shape[0] == b.shape[0], f"{scorers[0].name} and {scorers[1].name} disagree on the size of a chunk: {a.shape[0]} and {b.shape[0]}"
    a, b = _common(a, b.to(a.device), place)
    x, y = (_Row(t, targets, f"{s.name}: {place}") for t, s in zip((a, b), scorers, strict=True))
    nll, nll_reference, agree = _nll(x), _nll(y), _numpy(x.best == y.best)
    first_x, first_y = (r.logits.topk(min(BEST, a.shape[1])).indices for r in (x, y))
    common = (first_x[:, :, None] == first_y[:, None, :]).sum((1, 2))
    expected = (y.exp * (y.shifted - x.shifted)).sum(-1, dtype=torch.float64) / y.total
    kl = _numpy((expected - y.total.log() + x.total.log()).clamp_(min=0))
    worst = [_worst(row, kl[row], (x, y), (first_x, first_y), origin) for row in heapq.nlargest(WORST, range(len(kl)), key=kl.__getitem__)]
    return PairScores(nll, nll_reference, kl, agree, _numpy(common.to(torch.int8)), _numpy(x.best == targets), _numpy(y.best == targets), worst)


def _worst(row: int, kl: float, rows: tuple[_Row, _Row], best: tuple[torch.Tensor, torch.Tensor], origin: tuple[int, int]) -> WorstToken:
    """One position with what both models expected there."""

    def probability(of: _Row, token: int) -> float:
        return float(of.exp[row, token].double() / of.total[row])

    token = int(rows[0].targets[row])
    ours, theirs = ([Guess(int(t), probability(of, int(t))) for t in tokens[row, :SHOWN]] for of, tokens in zip(rows, best, strict=True))
    return WorstToken(origin[0], origin[1] + row, float(kl), token, probability(rows[0], token), probability(rows[1], token), ours, theirs)


def _common(a: torch.Tensor, b: torch.Tensor, place: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut both to the smaller vocabulary when what the larger one has more is padding, that is, never gets a probability above PADDING_MASS.

    Raises:
        UnsupportedError: it is not.
    """
    if a.shape[1] == b.shape[1]:
        return a, b
    size = min(a.shape[1], b.shape[1])
    larger = a if a.shape[1] > size else b
    extra = float(larger.float().softmax(-1)[:, size:].sum(-1).max())
    if not extra <= PADDING_MASS:
        raise UnsupportedError(
            f"the models have vocabularies of {a.shape[1]} and {b.shape[1]} tokens, and the larger one uses what it has more (probability {extra:.3g} in {place}); "
            "compare models that share a tokenizer"
        )
    return a[:, :size], b[:, :size]


def _numpy(x: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.cpu().numpy()
    return array


def _joined(parts: list[PairScores]) -> PairScores:
    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    columns = {name: column(name) for name in ("nll", "nll_reference", "kl", "agree", "common", "right", "right_reference")}
    return PairScores(**columns, worst=worst_of(part.worst for part in parts))


def worst_of(lists: Iterable[list[WorstToken]]) -> list[WorstToken]:
    """The positions with the largest divergence, at most 20, largest first."""
    return heapq.nlargest(WORST, (token for found in lists for token in found), key=lambda t: t.kl)
