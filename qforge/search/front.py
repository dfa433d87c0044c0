"""Runs over one model side by side: their figures, which of them are on the Pareto front of size, divergence and speed, and which can be told from the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qforge.evaluate import statistics
from qforge.evaluate.rows import KL_FLOOR, KL_MARGIN
from qforge.types import Evaluation, Results

SAME_SIZE = 1.001  # artifacts of one scheme differ by bytes of metadata
SAME_SPEED = 1.05  # two measurements of one artifact differ by as much

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep. All figures are None where `error` says why it has none.

    Attributes:
        name: of the variant, and of its folder.
        changes: what it sets, key path to value, as text.
        path: its folder, relative to the sweep's.
        passed: whether its gates, `num_gates` of them, hold.
        failed_gates: those that do not and fail the run.
        size_bytes: of all its weights; `size_ratio`: to the original at 16 bits; `bits_per_weight`: of the quantized layers.
        tokens_per_second: that one sequence gets from the built-in runtime; None where it does not run the model.
        seconds: what its own work took, without what it found finished.
        front: no other variant is as small, as near to the original and as fast, and better in one of them.
            As near: the paired difference's interval holds zero; as fast: of the same size, or within 5 %.
        against_best: its divergence against the least one of the sweep, paired: `best`, `same`, `worse`, `not enough data (needs about N tokens)`.
    """

    name: str
    changes: dict[str, str]
    path: str
    error: str | None = None
    passed: bool | None = None
    num_gates: int | None = None
    failed_gates: list[str] | None = None
    artifact_sha256: str | None = None
    size_bytes: int | None = None
    size_ratio: float | None = None
    bits_per_weight: float | None = None
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    perplexity_ratio_ci95: Interval | None = None
    kl_mean: float | None = None
    kl_mean_ci95: Interval | None = None
    top1_agreement: float | None = None
    top1_agreement_ci95: Interval | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    front: bool = False
    against_best: str | None = None


def variant(name: str, changes: dict[str, str], path: str, results: Results, tokens_per_second: float | None) -> Variant:
    """A run's row."""
    e, a = results.evaluation, results.artifact
    assert e is not None, "a sweep's recipes are evaluated"
    return Variant(
        name=name,
        changes=changes,
        path=path,
        passed=results.passed,
        num_gates=len(results.gates),
        failed_gates=[g.name for g in results.gates if not g.passed and g.on == "error"],
        artifact_sha256=a["sha256"],
        size_bytes=a["weights_bytes"],
        size_ratio=a["size_ratio"],
        bits_per_weight=a["bits_per_weight"],
        perplexity=e.candidate["perplexity"],
        perplexity_ratio=e.perplexity_ratio,
        perplexity_ratio_ci95=e.perplexity_ratio_ci95,
        kl_mean=e.kl_mean,
        kl_mean_ci95=e.kl_mean_ci95,
        top1_agreement=e.top1_agreement,
        top1_agreement_ci95=e.top1_agreement_ci95,
        tokens_per_second=tokens_per_second,
        seconds=math.fsum(results.timings.values()),
    )


def ranked(variants: Sequence[Variant], results: Sequence[Results | None]) -> list[Variant]:
    """The same with `front` and `against_best`. `results`: of each variant, None for one that has none."""
    done = [(v.kl_mean, i) for i, v in enumerate(variants) if v.kl_mean is not None]
    if not done:
        return list(variants)
    best = min(done)[1]
    evaluations = {i: _evaluation(results[i]) for _, i in done}
    return [
        v
        if i not in evaluations
        else replace(
            v,
            front=not any(_dominates(variants[j], v, _nearer(evaluations[j], evaluations[i])) for j in evaluations if j != i),
            against_best="best" if i == best else _against(evaluations[i], evaluations[best]),
        )
        for i, v in enumerate(variants)
    ]


def _evaluation(results: Results | None) -> Evaluation:
    assert results is not None
    assert results.evaluation is not None
    return results.evaluation


def _dominates(a: Variant, b: Variant, nearer: int) -> bool:
    """Whether `a` is at least as good in all figures, and better in one."""
    assert a.size_bytes is not None
    assert b.size_bytes is not None
    smaller = _beyond(b.size_bytes, a.size_bytes, SAME_SIZE)
    faster = 0  # of the same size they run the same kernels
    if smaller and a.tokens_per_second is not None and b.tokens_per_second is not None:
        faster = _beyond(a.tokens_per_second, b.tokens_per_second, SAME_SPEED)
    return min(smaller, nearer, faster) >= 0 and max(smaller, nearer, faster) > 0


def _beyond(x: float, y: float, factor: float) -> int:
    """1 where x is larger by more than a factor, -1 where y is, else 0."""
    return (x > factor * y) - (y > factor * x)


def _nearer(a: Evaluation, b: Evaluation) -> int:
    """1 where `a` diverges less from the original than `b`, -1 where more, 0 where that cannot be told."""
    low, high = _difference(a, b).interval or (0.0, 0.0)
    return (high < 0) - (low > 0)


def _difference(one: Evaluation, other: Evaluation) -> statistics.Mean:
    """Divergences paired by document or window."""
    assert one.text_sha256 == other.text_sha256, "a sweep has one evaluation text"
    pairs = list(zip(one.clusters, other.clusters, strict=True))
    return statistics.mean([float(a.kl_sum or 0.0) - float(b.kl_sum or 0.0) for a, b in pairs], [a.tokens for a, _ in pairs])


def _against(one: Evaluation, best: Evaluation) -> str:
    return str(statistics.verdict(_difference(one, best), max(KL_FLOOR, KL_MARGIN * float(best.kl_mean or 0.0))))
