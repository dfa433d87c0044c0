"""Perplexity, KL divergence and agreement of a candidate beside a reference, in memory of one chunk of logits from each.

Letters: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qforge.engines.base import Scorer
from qforge.errors import DataError, NumericalError, UnsupportedError
from qforge.evaluate import statistics
from qforge.progress import SILENT, Progress
from qforge.types import Cluster, Evaluation

MIN_DOCUMENTS = statistics.MIN_CLUSTERS  # with fewer documents than that, windows are the clusters
PADDING_MASS = 1e-3


class Windows(Protocol):
    """What is scored (`qforge.text.EvaluationWindows`): token ids, the document of each window, the text's hash, the protocol."""

    @property
    def ids(self) -> list[list[int]]:
        """Token ids, one list a window."""

    @property
    def documents(self) -> list[int]:
        """The document's index of each window."""

    @property
    def sha256(self) -> str:
        """Hash of the text."""

    @property
    def protocol(self) -> dict[str, Any]:
        """What makes figures comparable."""


@dataclass(frozen=True, slots=True)
class WindowScores:
    """fp64 figures of one window's scored positions `[positions]`; the last three only beside a reference."""

    nll: NDArray[np.float64]
    nll_reference: NDArray[np.float64] | None = None
    kl: NDArray[np.float64] | None = None
    agree: NDArray[np.bool_] | None = None


def evaluate(candidate: Scorer, reference: Scorer | None, windows: Windows, *, progress: Progress = SILENT) -> Evaluation:
    """Score a text with one model, or with two in step.

    Perplexity is exp of the mean negative log-likelihood (nats) over all scored positions; KL is KL(reference || candidate) in nats per position; agreement is the share of
    positions where both rank the same token first. Clusters are documents, or windows when there are fewer than 8 documents (`protocol["cluster"]` says which).

    Raises:
        DataError: there is no window to score.
        NumericalError: a model gives NaN or infinite logits (the message says which model, window and position).
        UnsupportedError: the two models do not share a vocabulary.
    """
    if not windows.ids:
        raise DataError("the evaluation text holds no full window; give a longer text, or a smaller window")
    scores = list(progress.track(score_windows(candidate, reference, windows.ids), "evaluate", len(windows.ids)))
    by_document = len(set(windows.documents)) >= MIN_DOCUMENTS
    clusters = _clusters(scores, windows.documents if by_document else list(range(len(scores))))
    protocol = {**windows.protocol, "cluster": "document" if by_document else "window"}
    result = Evaluation(windows.sha256, protocol, _title(candidate), sum(c.tokens for c in clusters), _perplexity([c.nll_candidate for c in clusters], clusters), clusters)
    return result if reference is None else _beside(result, reference, scores)


def _beside(result: Evaluation, reference: Scorer, scores: list[WindowScores]) -> Evaluation:
    """Add what only two models together have."""
    clusters = result.clusters
    sizes = [c.tokens for c in clusters]
    nll_reference = [float(c.nll_reference or 0.0) for c in clusters]
    log_ratio = statistics.mean([c.nll_candidate - n for c, n in zip(clusters, nll_reference, strict=True)], sizes)
    kl = statistics.mean([float(c.kl_sum or 0.0) for c in clusters], sizes)
    agreement = statistics.mean([float(c.agree or 0) for c in clusters], sizes)
    return replace(
        result,
        reference=_perplexity(nll_reference, clusters),
        reference_engine=_title(reference),
        perplexity_ratio=math.exp(log_ratio.value),
        perplexity_ratio_ci95=log_ratio.interval and (math.exp(log_ratio.interval[0]), math.exp(log_ratio.interval[1])),
        kl_mean=kl.value,
        kl_mean_ci95=kl.interval and (max(0.0, kl.interval[0]), kl.interval[1]),
        kl_p99=statistics.percentile([s.kl for s in scores if s.kl is not None], 99),
        top1_agreement=agreement.value,
        top1_agreement_ci95=agreement.interval and (max(0.0, agreement.interval[0]), min(1.0, agreement.interval[1])),
    )


def score_windows(candidate: Scorer, reference: Scorer | None, ids: list[list[int]]) -> Iterator[WindowScores]:
    """Yield one WindowScores a window. Both models' chunks are read in step; none is kept."""
    ours = candidate.score(ids)
    theirs = None if reference is None else reference.score(ids)
    for index, window in enumerate(ids):
        parts: list[WindowScores] = []
        start, length = 0, len(window) - 1
        while start < length:
            a = next(ours)
            assert a.shape[0] <= length - start, f"{candidate.name} yields a chunk of {a.shape[0]} positions where {length - start} are left in the window"
            targets = torch.tensor(window[start + 1 : start + 1 + a.shape[0]], device=a.device)
            place = f"window {index}, positions {start}..{start + a.shape[0] - 1}"
            if theirs is None:
                parts.append(WindowScores(_nll(_Row(a, targets, f"{candidate.name}: {place}"))))
            else:
                parts.append(_pair(a, next(theirs), targets, (candidate, reference), place))  # type: ignore[arg-type]  # a reference is there when its chunks are
            start += a.shape[0]
        yield _joined(parts)


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


def _pair(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor, scorers: tuple[Scorer, Scorer], place: str) -> WindowScores:
    """Figures of candidate logits `a` beside reference logits `b`, both `[C, V]`.

    KL = sum p_i (y_i - x_i) - (log Z_y - log Z_x) with y the reference's logits, x the candidate's: products in fp32, sums in fp64; within 1e-6 of a plain fp64 computation.
    """
    assert a.shape[0] == b.shape[0], f"{scorers[0].name} and {scorers[1].name} disagree on the size of a chunk: {a.shape[0]} and {b.shape[0]}"
    a, b = _common(a, b.to(a.device), place)
    x, y = (_Row(t, targets, f"{s.name}: {place}") for t, s in zip((a, b), scorers, strict=True))
    nll, nll_reference, agree = _nll(x), _nll(y), _numpy(x.best == y.best)
    expected = (y.exp * y.shifted.sub_(x.shifted)).sum(-1, dtype=torch.float64) / y.total
    kl = (expected - y.total.log() + x.total.log()).clamp_(min=0)
    return WindowScores(nll, nll_reference, _numpy(kl), agree)


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


def _joined(parts: list[WindowScores]) -> WindowScores:
    columns = ([getattr(p, name) for p in parts] for name in ("nll", "nll_reference", "kl", "agree"))
    return WindowScores(*(None if column and column[0] is None else np.concatenate(column) for column in columns))  # type: ignore[arg-type]  # the first is never None


def _clusters(scores: list[WindowScores], owners: list[int]) -> list[Cluster]:
    """Sums over the windows of each owner, owners in order of appearance."""
    members: dict[int, list[WindowScores]] = {}
    for owner, window in zip(owners, scores, strict=True):
        members.setdefault(owner, []).append(window)
    return [_cluster(windows) for windows in members.values()]


def _cluster(windows: list[WindowScores]) -> Cluster:
    tokens, nll = sum(len(w.nll) for w in windows), math.fsum(float(w.nll.sum()) for w in windows)
    if windows[0].kl is None:
        return Cluster(tokens, nll)
    return Cluster(
        tokens,
        nll,
        nll_reference=math.fsum(float(w.nll_reference.sum()) for w in windows if w.nll_reference is not None),
        kl_sum=math.fsum(float(w.kl.sum()) for w in windows if w.kl is not None),
        agree=sum(int(w.agree.sum()) for w in windows if w.agree is not None),
    )


def _perplexity(nll: list[float], clusters: list[Cluster]) -> dict[str, float]:
    mean = math.fsum(nll) / sum(c.tokens for c in clusters)
    if mean > 700:
        raise NumericalError(f"the mean negative log-likelihood is {mean:.4g} nats a token, too much for a perplexity; the model is broken")
    return {"perplexity": math.exp(mean), "nll": mean}


def _title(scorer: Scorer) -> str:
    return f"{scorer.name} {scorer.version}"
