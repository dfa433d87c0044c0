"""Perplexity, KL divergence and agreement of a candidate beside a reference: scores of positions -> the `Evaluation` that results.json holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

from qforge.engines.base import Scorer
from qforge.errors import DataError
from qforge.evaluate import measures, power, statistics
from qforge.evaluate.scores import PairScores, WindowScores, score_windows, worst_of
from qforge.evaluate.statistics import Mean, exponential
from qforge.evaluate.tokens import Tokens
from qforge.progress import SILENT, Progress
from qforge.types import Cluster, Evaluation


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

    @property
    def scored(self) -> list[list[int]] | None:
        """Of each window, the places of the tokens that are scored; None: all but the first."""

    @property
    def bytes(self) -> list[int] | None:
        """UTF-8 bytes that the scored tokens of each window stand for; None where the tokenizer does not tell."""


def evaluate(candidate: Scorer, reference: Scorer | None, windows: Windows, *, progress: Progress = SILENT) -> Evaluation:
    """Score a text with one model, or with two in step.

    Perplexity is exp of the mean negative log-likelihood (nats) over all scored positions; KL is KL(reference || candidate) in nats per position; agreement is the share of
    positions where both rank the same token first. Clusters are documents; of a single one its windows if there are eight (`protocol["cluster"]` says which).

    Raises:
        DataError: there is no window to score.
        NumericalError: a model gives NaN or infinite logits (the message says which model, window and position).
        UnsupportedError: the two models do not share a vocabulary.
    """
    if not windows.ids:
        raise DataError("the evaluation text holds no full window; give a longer text, or a smaller window")
    scores = list(progress.track(score_windows(candidate, reference, windows.ids, windows.scored), "evaluate", len(windows.ids)))
    owners, by_document = cluster_owners(windows.documents)
    clusters = _clusters(scores, owners)
    protocol = {**windows.protocol, "cluster": "document" if by_document else "window"}
    bytes_ = None if windows.bytes is None else _summed(windows.bytes, owners)
    ours = _figures([c.nll_candidate for c in clusters], clusters, bytes_)
    result = Evaluation(windows.sha256, protocol, _title(candidate), sum(c.tokens for c in clusters), ours, clusters)
    pairs = [s for s in scores if isinstance(s, PairScores)]
    return result if reference is None else _beside(result, reference, Tokens.of(pairs, owners), pairs, bytes_)


def cluster_owners(documents: list[int]) -> tuple[list[int], bool]:
    """The cluster of each window, numbered from 0 in order of appearance, and whether clusters are documents (else windows, of a single document that has enough)."""
    by_document = len(set(documents)) > 1 or len(documents) < statistics.MIN_CLUSTERS
    numbers = {d: i for i, d in enumerate(dict.fromkeys(documents))}
    return ([numbers[d] for d in documents] if by_document else list(range(len(documents)))), by_document


def _beside(result: Evaluation, reference: Scorer, tokens: Tokens, pairs: list[PairScores], bytes_: list[int] | None) -> Evaluation:
    """Add what only two models together have."""
    clusters = result.clusters
    sizes = [c.tokens for c in clusters]
    nll_reference = [float(c.nll_reference or 0.0) for c in clusters]
    log_ratio = statistics.mean([c.nll_candidate - n for c, n in zip(clusters, nll_reference, strict=True)], sizes)
    kl = statistics.mean([float(c.kl_sum or 0.0) for c in clusters], sizes)
    agreement = (statistics.share if tokens.differ() else statistics.mean)([float(c.agree or 0) for c in clusters], sizes)
    common = tokens.mean(tokens.common)
    return replace(
        result,
        reference=_figures(nll_reference, clusters, bytes_),
        reference_engine=_title(reference),
        perplexity_ratio=exponential(log_ratio.value),
        perplexity_ratio_ci95=_exponential(log_ratio),
        kl_mean=kl.value,
        kl_mean_ci95=kl.interval and (max(0.0, kl.interval[0]), kl.interval[1]),
        top1_agreement=agreement.value,
        top1_agreement_ci95=agreement.share,
        top5_agreement=common.value,
        top5_agreement_ci95=common.share,
        delta_p=measures.delta_p(tokens),
        flips=measures.flips(tokens),
        kl_by_position=measures.by_position(tokens),
        kl_histogram=measures.histogram(tokens.kl),
        worst_tokens=worst_of(p.worst for p in pairs),
        power=power.measured(log_ratio, kl, agreement),
        **measures.quantiles(tokens),
    )


def _exponential(mean: Mean) -> statistics.Interval | None:
    return mean.interval and (exponential(mean.interval[0]), exponential(mean.interval[1]))


def _summed(values: list[int], owners: list[int]) -> list[int]:
    sums = [0] * (max(owners) + 1)
    for owner, value in zip(owners, values, strict=True):
        sums[owner] += value
    return sums


def _clusters(scores: list[WindowScores], owners: list[int]) -> list[Cluster]:
    """Sums over the windows of each owner, owners in order of appearance."""
    members: dict[int, list[WindowScores]] = {}
    for owner, window in zip(owners, scores, strict=True):
        members.setdefault(owner, []).append(window)
    return [_cluster(windows) for windows in members.values()]


def _cluster(windows: list[WindowScores]) -> Cluster:
    tokens, nll = sum(len(w.nll) for w in windows), math.fsum(float(w.nll.sum()) for w in windows)
    pairs = [w for w in windows if isinstance(w, PairScores)]
    if not pairs:
        return Cluster(tokens, nll)
    return Cluster(
        tokens,
        nll,
        nll_reference=math.fsum(float(w.nll_reference.sum()) for w in pairs),
        kl_sum=math.fsum(float(w.kl.sum()) for w in pairs),
        agree=sum(int(w.agree.sum()) for w in pairs),
    )


def _figures(nll: list[float], clusters: list[Cluster], bytes_: list[int] | None) -> dict[str, Any]:
    """Perplexity, and bits per byte of text, which models with different tokenizers share."""
    mean = statistics.mean(nll, [c.tokens for c in clusters])
    found: dict[str, Any] = {"perplexity": exponential(mean.value), "perplexity_ci95": _exponential(mean), "nll": mean.value}
    if bytes_ is None or 0 in bytes_:
        return found
    bits = statistics.mean([n / math.log(2) for n in nll], bytes_)
    return found | {"bits_per_byte": bits.value, "bits_per_byte_ci95": bits.interval}


def _title(scorer: Scorer) -> str:
    return f"{scorer.name} {scorer.version}"
