"""What two results say of the same text, figure by figure: a row for people and scripts, and the numbers that a gate tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from qforge.evaluate import power, statistics
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import Interval, Mean, Verdict

# The smallest differences that matter. Measured on a 15M model at int4-g32 (GPTQ, 30,600 tokens): scales of one of 42 linears off by 5 % move KL divergence by +0.66 % of itself
# and perplexity by +0.12 %, which must be told apart; another calibration text moved them by +1.2 % (+-0.9 %) and -0.45 % (+-0.3 %, standard errors). So the margins separate
# "the same codes, damaged" from "the same", and on a long text also two honest runs with different calibration: --gate with a wider limit is for those.
PERPLEXITY_MARGIN = 0.001  # of the perplexity
KL_MARGIN = 0.0025  # of the baseline's KL divergence
KL_FLOOR = 2e-5  # nats: below that, arithmetic in another order
AGREEMENT_MARGIN = 0.002  # of all positions
_LARGEST_EXPONENT = 700.0


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
        return statistics.needs_tokens(self.mean, max(abs(self.value - bound) / self.slope, self.margin))


def exact(value: float) -> Figure:
    """Of what is not sampled."""
    return Figure(float(value), None, None)


def exponential(value: float) -> float:
    """e to a number of nats, finite also for the end of an interval that is far too wide."""
    return math.exp(min(value, _LARGEST_EXPONENT))


def of_mean(mean: Mean, margin: float, wrap: Callable[[float], float] = float, unit: str = "tokens") -> Figure:
    """A mean as a figure; `wrap`: `exponential`, or as it is."""
    value = wrap(mean.value)
    return Figure(value, mean.interval and (wrap(mean.interval[0]), wrap(mean.interval[1])), mean, value if wrap is exponential else 1.0, margin, unit)


def negative(mean: Mean) -> Mean:
    """The same with the other sign."""
    return replace(mean, value=-mean.value, interval=mean.interval and (-mean.interval[1], -mean.interval[0]))


def detectable(change: Mean, wrap: Callable[[float], float] = float) -> float | None:
    """See `Row`."""
    return wrap(power.DETECTABLE * change.error) if math.isfinite(change.error) else None


def text_rows(baseline: Side, candidate: Side, *, references: bool) -> tuple[list[Row], dict[str, Figure]]:
    """Rows and gate figures of the text; `references`: both sides were measured against an original."""
    sizes = baseline.column("tokens")
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    for name in ("perplexity", "kl_mean", "top1_agreement") if references else ("perplexity",):
        column = {"perplexity": "nll_candidate", "kl_mean": "kl_sum", "top1_agreement": "agree"}[name]
        a, b = (statistics.mean(side.column(column), sizes) for side in (baseline, candidate))
        change = statistics.mean([y - x for x, y in zip(baseline.column(column), candidate.column(column), strict=True)], sizes)
        if baseline.clusters == candidate.clusters:  # however short the text: of two that are equal in every sum it is known that nothing differs
            change = replace(change, error=0.0, interval=(0.0, 0.0))
        if name == "perplexity":
            wide, far = of_mean(change, math.log1p(PERPLEXITY_MARGIN), exponential), detectable(change, lambda x: math.expm1(min(x, _LARGEST_EXPONENT)))
            rows.append(Row(name, exponential(a.value), exponential(b.value), "ratio", wide.value, wide.interval, PERPLEXITY_MARGIN, far, statistics.verdict(change, wide.margin)))
            figures |= {"perplexity_ratio": wide, name: of_mean(b, wide.margin, exponential)}
            continue
        margin = AGREEMENT_MARGIN if name == "top1_agreement" else max(KL_MARGIN * a.value, KL_FLOOR)
        verdict = statistics.verdict(negative(change) if name == "top1_agreement" else change, margin)
        rows.append(Row(name, a.value, b.value, "difference", change.value, change.interval, margin, detectable(change), verdict))
        figures |= {name: of_mean(b, margin), f"{name}_change": of_mean(change, margin)}
    return rows, figures
