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
    """One window's scored positions, `[positions]` each.

    Attributes:
        before: how many tokens of the window lie before it.
        nll: negative log-likelihood of the true token under the candidate, fp64, nats.
    """

    before: NDArray[np.int64]
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


def score_windows(candidate: Scorer, reference: Scorer | None, ids: list[list[int]], scored: list[list[int]] | None = None) -> Iterator[WindowScores]:
    """Yield the scores of each window, `PairScores` beside a reference. Both models' chunks are read in step; none is kept.

    Args:
        candidate, reference: what computes.
        ids: windows.
        scored: of each window, the places (from 1, ascending, at least one) of the tokens that are scored; None: all but the first.

    Raises:
        NumericalError: a model gives NaN or infinite logits.
        UnsupportedError: the models do not share a vocabulary.
    """
    ours = candidate.score(ids)
    theirs = None if reference is None else reference.score(ids)
    rooms = _Room(), _Room()
    for index, window in enumerate(ids):
        alone: list[WindowScores] = []
        pairs: list[PairScores] = []
        start, length = 0, len(window) - 1
        places = np.arange(1, len(window)) if scored is None else np.asarray(scored[index], np.int64)
        while start < length:
            a, b = next(ours), None if theirs is None else next(theirs)
            assert a.shape[0] <= length - start, f"{candidate.name} yields a chunk of {a.shape[0]} positions where {length - start} are left in the window"
            assert b is None or a.shape[0] == b.shape[0], f"{candidate.name} and the reference disagree on the size of a chunk: {a.shape[0]} and {len(b)}"
            here = places[(places > start) & (places <= start + a.shape[0])]
            start += a.shape[0]
            if not len(here):
                continue
            rows = torch.as_tensor(here - 1 - start + a.shape[0], device=a.device)
            targets = torch.tensor([window[p] for p in here], device=a.device)
            where = f"window {index}, positions {here[0] - 1}..{here[-1] - 1}"
            if b is None or reference is None:
                alone.append(WindowScores(here, _alone(_taken(a, rows), targets, f"{candidate.name}: {where}", rooms[0])))
            else:
                pairs.append(_pair(_taken(a, rows), _taken(b, rows.to(b.device)), targets, (candidate, reference), where, (index, here), rooms))
        yield _joined(pairs) if pairs else WindowScores(places, np.concatenate([part.nll for part in alone]))


def _taken(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a chunk; the chunk itself where all are wanted."""
    return logits if len(rows) == logits.shape[0] else logits[rows]


class _Room:
    """Memory for a chunk's exponentials, the same for every chunk: fresh pages for each cost as much as the arithmetic."""

    def __init__(self) -> None:
        self._held = torch.empty(2, 0)

    def take(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two fp32 tensors of the shape of a chunk `[C, V]`; what was taken before is overwritten."""
        count = like.numel()
        if self._held.shape[1] < count or self._held.device != like.device:
            self._held = torch.empty(2, count, device=like.device)
        return self._held[0, :count].view(like.shape), self._held[1, :count].view(like.shape)


class _Row:
    """Softmax of a chunk of logits `[C, V]`, fp32 exponentials summed in fp64, its five most likely tokens, and the true tokens `[C]`."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor, place: str, room: _Room) -> None:
        if int(targets.max()) >= logits.shape[1]:
            raise UnsupportedError(
                f"{place}: token {int(targets.max())} is outside of this model's vocabulary of {logits.shape[1]}; the text was cut with another model's tokenizer"
            )
        self.logits, self.targets, self.place = logits.float(), targets, place
        values, self.likely = self.logits.topk(min(BEST, logits.shape[1]))
        self.top, self.best = values[:, 0], self.likely[:, 0]
        self.shifted, self.exp = room.take(self.logits)
        torch.sub(self.logits, self.top[:, None], out=self.shifted)
        torch.exp(self.shifted, out=self.exp)
        self.total = _sum(self.exp)

    def check(self) -> None:
        """Refuse logits that are NaN or infinite."""
        bad = ~torch.isfinite(self.logits)
        if bool(bad.any()):
            row = int(bad.any(-1).nonzero()[0])
            raise NumericalError(f"{self.place}: {int(bad.sum())} of {bad.numel()} logits are NaN or infinite (first in position {row} of these); this model cannot be scored")


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sums of rows `[C, V]` in fp64 `[C]`: four terms in fp32 first, a quarter of the vocabulary apart, so that what is copied in fp64 is a quarter."""
    quarter = values.shape[1] // 4
    sums: torch.Tensor = values[:, : 4 * quarter].unflatten(1, (4, quarter)).sum(1).sum(-1, dtype=torch.float64)
    return sums + values[:, 4 * quarter :].sum(-1, dtype=torch.float64)


def _nll(row: _Row) -> NDArray[np.float64]:
    true = row.logits.gather(-1, row.targets[:, None])[:, 0].double()
    return _numpy(row.total.log() + (row.top.double() - true))


def _alone(logits: torch.Tensor, targets: torch.Tensor, place: str, room: _Room) -> NDArray[np.float64]:
    """Negative log-likelihood of `targets` under logits `[C, V]`."""
    row = _Row(logits, targets, place, room)
    if not bool(torch.isfinite(_sum(row.shifted)).all()):
        row.check()
    return _nll(row)


def _pair(
    a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor, scorers: tuple[Scorer, Scorer], place: str, origin: tuple[int, NDArray[np.int64]], rooms: tuple[_Room, _Room]
) -> PairScores:  # fmt: skip
    """Figures of candidate logits `a` beside reference logits `b`, both `[C, V]`. `origin`: the window's index and how many tokens lie before each of `targets`.

    KL = sum p_i (y_i - x_i) - (log Z_y - log Z_x) with y the reference's logits, x the candidate's: products in fp32, sums in fp64; within 1e-6 of a plain fp64 computation.
    """
    a, b = _common(a, b.to(a.device), place)
    x, y = (_Row(t, targets, f"{s.name}: {place}", room) for t, s, room in zip((a, b), scorers, rooms, strict=True))
    expected = _sum(y.shifted.sub_(x.shifted).mul_(y.exp)) / y.total  # neither NaN nor infinity on either side leaves this finite
    if not bool(torch.isfinite(expected).all()):
        x.check()
        y.check()
    nll, nll_reference, agree = _nll(x), _nll(y), _numpy(x.best == y.best)
    common = (x.likely[:, :, None] == y.likely[:, None, :]).sum((1, 2))
    kl = _numpy((expected - y.total.log() + x.total.log()).clamp_(min=0))
    worst = [_worst(row, kl[row], (x, y), (x.likely, y.likely), (origin[0], int(origin[1][row]))) for row in heapq.nlargest(WORST, range(len(kl)), key=kl.__getitem__)]
    return PairScores(origin[1], nll, nll_reference, kl, agree, _numpy(common.to(torch.int8)), _numpy(x.best == targets), _numpy(y.best == targets), worst)


def _worst(row: int, kl: float, rows: tuple[_Row, _Row], best: tuple[torch.Tensor, torch.Tensor], origin: tuple[int, int]) -> WorstToken:
    """One position (`origin`: its window, and how many tokens lie before it) with what both models expected there."""

    def probability(of: _Row, token: int) -> float:
        return float(of.exp[row, token].double() / of.total[row])

    token = int(rows[0].targets[row])
    ours, theirs = ([Guess(int(t), probability(of, int(t))) for t in tokens[row, :SHOWN]] for of, tokens in zip(rows, best, strict=True))
    return WorstToken(*origin, float(kl), token, probability(rows[0], token), probability(rows[1], token), ours, theirs)


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

    columns = {name: column(name) for name in ("before", "nll", "nll_reference", "kl", "agree", "common", "right", "right_reference")}
    return PairScores(**columns, worst=worst_of(part.worst for part in parts))


def worst_of(lists: Iterable[list[WorstToken]]) -> list[WorstToken]:
    """The positions with the largest divergence, at most 20, largest first."""
    return heapq.nlargest(WORST, (token for found in lists for token in found), key=lambda t: t.kl)
