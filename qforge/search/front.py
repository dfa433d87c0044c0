"""Runs over one model side by side: their figures, which of them are on the Pareto front of size and divergence, and which can be told from the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qforge.evaluate import statistics
from qforge.evaluate.rows import KL_FLOOR, KL_MARGIN
from qforge.types import Results

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep. All figures are None where `error` says why it has none.

    Attributes:
        name: of the variant, and of its folder.
        changes: what it sets, key path to value, as text.
        path: its folder, relative to the sweep's.
        passed: whether its gates hold.
        failed_gates: those that do not and fail the run.
        size_bytes: of all its weights; `size_ratio`: to the original at 16 bits; `bits_per_weight`: of the quantized layers.
        tokens_per_second: that one sequence gets from the built-in runtime; None where it does not run the model.
        seconds: what its own work took, without what it found finished.
        front: no other variant is smaller and nearer to the original (or as small and nearer, or smaller and as near).
        against_best: its divergence against the least one of the sweep, paired: `best`, `same`, `worse`, `not enough data (needs about N tokens)`.
    """

    name: str
    changes: dict[str, str]
    path: str
    error: str | None = None
    passed: bool | None = None
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
    return [
        v if v.kl_mean is None else replace(v, front=not any(_dominates(o, v) for o in variants), against_best="best" if i == best else _against(results[i], results[best]))
        for i, v in enumerate(variants)
    ]


def _dominates(a: Variant, b: Variant) -> bool:
    """Whether `a` is at least as good in both figures, and better in one."""
    if a.kl_mean is None or b.kl_mean is None or a.size_bytes is None or b.size_bytes is None:
        return False
    return a.kl_mean <= b.kl_mean and a.size_bytes <= b.size_bytes and (a.kl_mean < b.kl_mean or a.size_bytes < b.size_bytes)


def _against(one: Results | None, best: Results | None) -> str:
    """Divergences paired by document or window."""
    assert one is not None
    assert one.evaluation is not None
    assert best is not None
    assert best.evaluation is not None
    assert one.evaluation.text_sha256 == best.evaluation.text_sha256, "a sweep has one evaluation text"
    pairs = list(zip(one.evaluation.clusters, best.evaluation.clusters, strict=True))
    difference = statistics.mean([float(a.kl_sum or 0.0) - float(b.kl_sum or 0.0) for a, b in pairs], [a.tokens for a, _ in pairs])
    return str(statistics.verdict(difference, max(KL_FLOOR, KL_MARGIN * float(best.evaluation.kl_mean or 0.0))))
