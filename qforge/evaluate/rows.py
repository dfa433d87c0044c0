"""What two results say of the same text, figure by figure: a row for people and scripts, and the numbers that a gate tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from qforge.evaluate import power, statistics
from qforge.evaluate.changes import find
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import Interval, Mean, Verdict, exponential

# The smallest differences that matter. Measured on a 15M model at int4-g32 (GPTQ, 30,600 tokens): scales of one of 42 linears off by 5 % move KL divergence by +0.66 % of itself
# and perplexity by +0.12 %, which must be told apart. Another draw of calibration tokens gives other codes, whose quality differs, too: of 110 ordered pairs of runs (tiny random
# model, GPTQ int4-g32, KL divergence 0.17, 11 seeds) perplexity moved by up to 2.4 % (0.14 of the divergence), the divergence by up to 8.9 % of itself, agreement by up to 0.02
# (0.07 of the disagreement). So, where both results tell that they were calibrated with different tokens of one text, only what is beyond that matters.
PERPLEXITY_MARGIN = 0.001  # of the perplexity
KL_MARGIN = 0.0025  # of the baseline's KL divergence
KL_FLOOR = 2e-5  # nats: below that, arithmetic in another order
AGREEMENT_MARGIN = 0.002  # of all positions
RECALIBRATED = 0.1  # of the baseline's KL divergence, and of its disagreement, where the draw of calibration tokens differs
RECALIBRATED_PERPLEXITY = 0.2  # of the baseline's KL divergence in nats, of log-perplexity


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides.

    Attributes:
        name: perplexity, kl_mean, top1_agreement, or TASK.METRIC.
        baseline, candidate: both values.
        kind: what `change`, its interval and `margin` are: a `ratio` (perplexity) or a `difference`, candidate against baseline.
        margin: the smallest difference that matters.
        detectable: the difference that a text like this one shows in four of five comparisons of this pair; None where nothing is known of the spread.
        verdict: what it comes to; what it needs is counted in `unit`.
        unit: tokens or questions.
    """

    name: str
    baseline: float
    candidate: float
    kind: str
    change: float
    interval: Interval | None
    margin: float
    detectable: float | None
    verdict: Verdict
    unit: str = "tokens"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a gate tests: `exact` figures have no interval because nothing is sampled.

    Attributes:
        mean: what `value` and `interval` were computed from; None for an exact figure.
        slope: how fast `value` goes with the mean.
        margin: the smallest difference of the mean that matters.
        unit: of what the mean was taken over.
    """

    value: float
    interval: Interval | None
    mean: Mean | None
    slope: float = 1.0
    margin: float = 1.0
    unit: str = "tokens"

    def needs(self, bound: float) -> int | None:
        """About how many tokens (or questions) would give an interval that tells on which side of `bound` the value lies; None where there is one, or nothing is sampled."""
        if self.mean is None or self.interval is not None:
            return None
        return statistics.needs_tokens(self.mean, max(abs(self.value - bound) / self.slope, self.margin))[0]


def exact(value: float) -> Figure:
    """The figure of a value that is not sampled, and so has no interval."""
    return Figure(float(value), None, None)


def of_mean(mean: Mean, margin: float, wrap: Callable[[float], float] = float, unit: str = "tokens") -> Figure:
    """A mean as a figure; `wrap`: `exponential`, or as it is."""
    value = wrap(mean.value)
    return Figure(value, mean.interval and (wrap(mean.interval[0]), wrap(mean.interval[1])), mean, value if wrap is exponential else 1.0, margin, unit)


def negative(mean: Mean) -> Mean:
    """The same with the other sign."""
    return replace(mean, value=-mean.value, interval=mean.interval and (-mean.interval[1], -mean.interval[0]))


def detectable(change: Mean, wrap: Callable[[float], float] = float) -> float | None:
    """See `Row`."""
    return wrap(power.detectable(change)) if math.isfinite(change.half_width) else None


def recalibrated(baseline: Side, candidate: Side) -> bool:
    """Whether both results tell that they were calibrated with different tokens of one text."""
    a, b = ([find(side.results, ("calibration", name)) for name in ("text_sha256", "sha256")] for side in (baseline, candidate))
    return a[0] is not None and a[0] == b[0] and a[1] != b[1]


def same_artifact(baseline: Side, candidate: Side) -> bool:
    """Whether both results tell that they are of the same files."""
    a, b = (find(side.results, ("artifact", "sha256")) for side in (baseline, candidate))
    return a is not None and a == b


def _margin(name: str, baseline: Mean, divergence: float | None, *, again: bool) -> float:
    """The smallest difference that matters: of a perplexity in nats.

    Args:
        name: of the row.
        baseline: the baseline's figure.
        divergence: the baseline's KL divergence, where it is known.
        again: whether the draw of calibration tokens differs.
    """
    if name == "perplexity":
        return max(math.log1p(PERPLEXITY_MARGIN), RECALIBRATED_PERPLEXITY * divergence if again and divergence is not None else 0.0)
    if name == "top1_agreement":
        return max(AGREEMENT_MARGIN, RECALIBRATED * (1 - baseline.value) if again else 0.0)
    return max((RECALIBRATED if again else KL_MARGIN) * baseline.value, KL_FLOOR)


def _figure(name: str, *sides: Side) -> Callable[..., Mean]:
    """A share, of which none seen is not none, unless the models are known to be equal to the original."""
    return statistics.share if name == "top1_agreement" and any(any(side.column("kl_sum")) for side in sides) else statistics.mean


def text_rows(baseline: Side, candidate: Side, *, references: bool) -> tuple[list[Row], dict[str, Figure]]:
    """Rows and gate figures of the text; `references`: both sides were measured against an original."""
    sizes = baseline.column("tokens")
    divergence = statistics.mean(baseline.column("kl_sum"), sizes).value if references else None
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    for name in ("perplexity", "kl_mean", "top1_agreement") if references else ("perplexity",):
        column = {"perplexity": "nll_candidate", "kl_mean": "kl_sum", "top1_agreement": "agree"}[name]
        a, b = (_figure(name, side)(side.column(column), sizes) for side in (baseline, candidate))
        change = _figure(name, baseline, candidate)([y - x for x, y in zip(baseline.column(column), candidate.column(column), strict=True)], sizes)
        if baseline.clusters == candidate.clusters:  # however short the text: of two that are equal in every sum it is known that nothing differs
            change = replace(change, error=0.0, interval=(0.0, 0.0))
        margin = _margin(name, a, divergence, again=recalibrated(baseline, candidate))
        if name == "perplexity":
            wide, far = of_mean(change, margin, exponential), detectable(change, power.growth)
            rows.append(Row(name, exponential(a.value), exponential(b.value), "ratio", wide.value, wide.interval, math.expm1(margin), far, statistics.verdict(change, margin)))
            figures |= {"perplexity_ratio": wide, name: of_mean(b, wide.margin, exponential)}
            continue
        verdict = statistics.verdict(negative(change) if name == "top1_agreement" else change, margin)
        rows.append(Row(name, a.value, b.value, "difference", change.value, change.interval, margin, detectable(change), verdict))
        figures |= {name: of_mean(b, margin), f"{name}_change": of_mean(change, margin)}
    return rows, figures
