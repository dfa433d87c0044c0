"""Intervals and verdicts for figures that are ratios of sums over clusters: tokens of one document are not independent, so documents are what is resampled.

Every figure here is `sum(values) / sum(sizes)` over clusters (a mean per token, clusters of unequal length). Its 95 % interval is a studentized
cluster bootstrap (bootstrap-t; Efron & Tibshirani 1993, section 12.5, with the linearised variance of a ratio). Differences between two models are
paired: the values are then per-cluster differences on the same tokens.

Measured coverage of the nominal 95 % (1,500 trials a case, 5 to 60 clusters of unequal length): 94-97 % for clusters that look like differences of
log-likelihood, KL divergences or agreement, 91-95 % for strongly skewed ones (log-normal, sigma 0.8); a percentile bootstrap gives 80-92 % at 8 to 20
clusters. Below `MIN_RESAMPLED` clusters there are too few resamples: the interval is Student's with one degree of freedom less than clusters, widened by the
jackknife's factor, which covers 94-98 % (90-95 % of strongly skewed ones). `tests/laws/test_laws_statistics.py` holds it. One cluster has no interval.

Where nothing varies there is nothing to resample: a share that no token was seen to have, or all, has the rule of three's end (`share`), and answers to the same questions,
which are one bit each and often all alike, have a score interval (`paired_shares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_CLUSTERS = 8  # for an interval of a quantile, and of a single document's windows
MIN_RESAMPLED = 5
MIN_TAIL = 10  # tokens beyond a quantile, for an interval
RESAMPLES = 2000
_MOST_CLUSTERS = 2000
_ENOUGH_CLUSTERS = 20
_LEAST_GROWTH = 1.1
NORMAL_975 = 1.959963984540054
# How much larger the variance of a mean is than that of as many independent tokens. stories15M, plain rounding to int4-g32, 16,129 tokens in 127 windows: 1.49.
DESIGN_EFFECT = 1.5
_KNOWN = 0.6
_NORMAL_90 = 1.2815515655446004
_LARGEST_EXPONENT = 700.0
_SMALLEST_ERROR = 0.1  # of the sample's: a resample of nearly equal clusters says nothing on the error's size

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean per token: its value, its standard error, its 95 % interval (None for a single cluster), and how much was seen."""

    value: float
    error: float
    interval: Interval | None
    clusters: int
    tokens: int

    @property
    def share(self) -> Interval | None:
        """The interval of a mean that can only lie between 0 and 1."""
        return self.interval and (max(0.0, self.interval[0]), min(1.0, self.interval[1]))

    @property
    def half_width(self) -> float:
        """Half of the interval's width; without an interval, infinite."""
        return math.inf if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def exponential(nats: float) -> float:
    """e to a number of nats, at most e^700: finite also for a broken model's perplexity, and for the end of an interval that is far too wide."""
    return math.exp(min(nats, _LARGEST_EXPONENT))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a paired difference says: `better`, `same`, `worse` or `not enough data`; then `needs_tokens` is about how many tokens would tell, `needs_between` its range."""

    word: str
    needs_tokens: int | None = None
    needs_between: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.needs_tokens is None:
            return self.word
        between = "" if self.needs_between is None else f"; {self.needs_between[0]:,} to {self.needs_between[1]:,}"
        return f"{self.word} (needs about {self.needs_tokens:,} tokens{between})"


def mean(values: ArrayLike, sizes: ArrayLike, *, seed: int = 0) -> Mean:
    """The mean per token of per-cluster sums `values [n]` over `sizes [n]` tokens, with its interval.

    Beyond 2,000 clusters neighbours are pooled, which bounds the cost and leaves the interval valid. Same input, same interval.
    """
    x, t = np.asarray(values, np.float64), np.asarray(sizes, np.float64)
    tokens, clusters = int(t.sum()), len(t)
    if clusters > _MOST_CLUSTERS:
        starts = np.linspace(0, clusters, _MOST_CLUSTERS, endpoint=False).astype(int)
        x, t = np.add.reduceat(x, starts), np.add.reduceat(t, starts)
    value = math.fsum(x) / tokens
    error = float(_errors(np.ones((1, len(t))), x, t)[1][0]) if len(t) > 1 else math.inf
    interval = None if clusters == 1 else _student_t(value, error, clusters) if clusters < MIN_RESAMPLED else _bootstrap_t(x, t, value, error, seed)
    return Mean(value, error, interval, clusters, tokens)


def share(values: ArrayLike, sizes: ArrayLike) -> Mean:
    """`mean` of what each token has or has not (or of differences of such counts, all zero). That none was seen to have it, or all, still leaves room for a few: the interval
    then ends where as many independent tokens as `DESIGN_EFFECT` leaves would show none with a probability of 2.5 % (the rule of three)."""
    found = mean(values, sizes)
    if found.interval is None or found.error > 0 or found.value not in (0.0, 1.0):
        return found
    room = 1 - 0.025 ** (DESIGN_EFFECT / found.tokens)
    return replace(found, error=room / NORMAL_975, interval=(found.value - room, found.value + room))


def _errors(weights: NDArray[np.float64], x: NDArray[np.float64], t: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ratio and linearised standard error for each row of cluster counts `weights [B, n]`."""
    n = len(t)
    total = weights @ t
    ratio = (weights @ x) / total
    variance = weights @ (x * x) - 2 * ratio * (weights @ (x * t)) + ratio**2 * (weights @ (t * t))
    return ratio, np.sqrt(np.maximum(variance, 0) * n / (n - 1)) / total


def _student_t(value: float, error: float, clusters: int) -> Interval:
    half = _student_975(clusters - 1) * error * clusters / (clusters - 1)
    return value - half, value + half


def _bootstrap_t(x: NDArray[np.float64], t: NDArray[np.float64], value: float, error: float, seed: int) -> Interval:
    if error <= 1e-12 * abs(value) or error == 0:
        return value, value
    x = x - value * t  # centred, so that squares do not cancel
    shift, errors = _errors(_resamples(len(t), seed), x, t)
    low, high = np.quantile(shift / np.maximum(errors, _SMALLEST_ERROR * error), [0.025, 0.975])
    error *= len(t) / (len(t) - 1)  # what the jackknife allows for a cluster's pull on the value; without it coverage at 20 clusters is 92-94.5 %
    return value - float(high) * error, value - float(low) * error


@lru_cache(maxsize=1)
def _resamples(n: int, seed: int) -> NDArray[np.float64]:
    """How often each of n clusters is drawn in each resample `[RESAMPLES, n]` (kept for the next figure of the same text; at most 32 MB)."""
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    weights.setflags(write=False)
    return weights


def verdict(difference: Mean, margin: float) -> Verdict:
    """Judge a paired difference whose positive values are bad.

    `worse` and `better`: the interval excludes zero and the difference exceeds the practical margin. Otherwise `same` when the interval is narrow enough
    to have shown a difference of `margin` (half-width <= margin), and else `not enough data`: the text would have to be about (half-width / margin)^2 times longer.
    When the models are equal, a verdict of `worse` has a probability of about 2.5 % (measured: 1-3 %) where differences between clusters are symmetric, and of up to 9 % where
    they have a long tail towards `better` (exponential: 8 % for 4 clusters, 5 % for 8, 4 % for 12).
    """
    if difference.error == 0 and difference.value == 0:
        return Verdict("same")
    if difference.interval is not None:
        low, high = difference.interval
        if low > 0 and difference.value > margin:
            return Verdict("worse")
        if high < 0 and difference.value < -margin:
            return Verdict("better")
        if difference.half_width <= margin:
            return Verdict("same")
    return Verdict("not enough data", *needs_tokens(difference, margin))


def paired_shares(gained: int, lost: int, questions: int) -> Mean:
    """The difference of two shares of the same questions, with Tango's score interval (1998, Statistics in Medicine 17), which says something also where no answer differs.

    Args:
        gained: questions that only the second side answers rightly.
        lost: those that only the first one does.
        questions: all of them.
    """

    def score(change: float) -> float:
        """How many standard errors the observed change is above `change`, the share of lost questions being the likeliest one under it."""
        b = (2 * questions - gained + lost) * change - gained - lost
        likeliest = (math.sqrt(b * b + 8 * questions * lost * change * (1 - change)) - b) / (4 * questions)
        variance = questions * (2 * likeliest + change * (1 - change))
        above = gained - lost - questions * change
        return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above)

    value = (gained - lost) / questions
    ends = []
    for end, wanted in ((-1.0, NORMAL_975), (1.0, -NORMAL_975)):
        inside, outside = value, end
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) <= abs(wanted) else (inside, middle)
        ends.append(inside)
    # Agresti and Min 2005: half a pair more of each kind
    n = questions + 2
    error = math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / n) / n
    return Mean(value, error, (ends[0], ends[1]), questions, questions)


def needs_tokens(difference: Mean, margin: float) -> tuple[int, tuple[int, int] | None]:
    """About how many tokens of such text bring the half-width of the 95 % interval down to `margin` (two leading digits), and an 80 % range of that.

    From the standard error, whose square is distributed about like chi-square with one degree of freedom less than clusters (Wilson-Hilferty): median-unbiased, because few
    clusters understate it. For the range it has _KNOWN of these, because clusters are of unequal length: measured, the range holds the truth in 78-89 % of texts (3 to 100
    clusters of 50 to 500 tokens), and in 59-92 % where differences between clusters have a long tail (log-normal, sigma 0.5). Never fewer tokens than 20 clusters have.
    A single cluster knows of no spread, and so of no range.
    """
    freedom = difference.clusters - 1
    least = max(_ENOUGH_CLUSTERS / difference.clusters, _LEAST_GROWTH)
    if not freedom:
        return _two_digits(difference.tokens * least), None
    squared = (NORMAL_975 * difference.error / margin) ** 2
    low, high = (squared / _chi_square(_KNOWN * freedom, z) for z in (_NORMAL_90, -_NORMAL_90))
    about, low, high = (_two_digits(difference.tokens * max(growth, least)) for growth in (squared / _chi_square(freedom, 0.0), low, high))
    return about, (min(low, about), max(high, about))


def _chi_square(freedom: float, z: float) -> float:
    """The quantile of chi-square / freedom where a normal's is z (Wilson and Hilferty 1931), kept above zero where that is rough."""
    part = 2 / (9 * freedom)
    return float(max(1 - part + z * math.sqrt(part), 0.1) ** 3)


def _two_digits(tokens: float) -> int:
    step = 10.0 ** max(0, math.floor(math.log10(tokens)) - 1)
    return int(math.ceil(tokens / step) * step)


def mean_and_error(values: ArrayLike, sizes: ArrayLike) -> tuple[float, float]:
    """The mean per token and its linearised standard error over clusters, without the cost of an interval; the error is infinite for one cluster."""
    x, t = np.asarray(values, np.float64), np.asarray(sizes, np.float64)
    value = math.fsum(x) / math.fsum(t)
    return value, float(_errors(np.ones((1, len(t))), x - value * t, t)[1][0]) if len(t) > 1 else math.inf


def quantile(values: NDArray[np.float64], clusters: NDArray[np.int64], sizes: NDArray[np.float64], share: float) -> tuple[float, Interval | None]:
    """A quantile of per-token values (linear interpolation) and its 95 % interval.

    Woodruff 1952: an interval of the share of tokens above the quantile is read back through the distribution. That share's is Korn and Graubard's (1998, Survey Methodology
    24): Clopper and Pearson's exact one for as many independent tokens as the clusters are worth. How many those are is known the less the fewer clusters hold the tail, which
    widens the interval by Student's t with (sum a)^2 / sum a^2 - 1 degrees of freedom (a: a cluster's tokens above). None below MIN_CLUSTERS clusters, or where fewer than
    MIN_TAIL tokens are expected beyond the quantile: such a tail tells of single documents.

    Args:
        values: `[tokens]`.
        clusters: the cluster of each token, numbered from 0.
        sizes: tokens of each cluster.
        share: 0..1.
    """
    value = float(np.quantile(values, share))
    tail = min(share, 1 - share)
    if len(sizes) < MIN_CLUSTERS or tail * len(values) < MIN_TAIL:
        return value, None
    above = np.bincount(clusters, weights=values > value, minlength=len(sizes)).astype(np.float64)
    if not above.any():
        return value, (value, value)
    low, high = _share_interval(above, sizes, 1 - share)
    ends = np.quantile(values, [1 - high, 1 - low])
    return value, (min(value, float(ends[0])), max(value, float(ends[1])))


def _share_interval(counts: NDArray[np.float64], sizes: NDArray[np.float64], share: float) -> Interval:
    """Korn and Graubard's interval of a share of which clusters hold `counts [n]` of `sizes [n]` tokens."""
    _, error = mean_and_error(counts, sizes)
    held = float(counts.sum() ** 2 / (counts @ counts))
    independent = share * (1 - share) / error**2 if error > 0 else float(sizes.sum())
    independent *= (NORMAL_975 / _student_975(max(held - 1, 1.0))) ** 2
    found = share * independent
    return _beta_quantile(0.025, found, independent - found + 1), _beta_quantile(0.975, found + 1, independent - found)


@lru_cache
def _student_975(freedom: float) -> float:
    """Student's 97.5 % quantile: t^2 = f (1 - b) / b, b the 5 % quantile of Beta(f / 2, 1 / 2)."""
    b = _beta_quantile(0.05, freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - b) / b)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    """Of Beta(a, b), to four digits: its density in the logit, which has one peak, summed on a grid around that peak."""
    peak, width = math.log(a / b), math.sqrt(1 / a + 1 / b)
    u = peak + width * np.linspace(-40, 40, 16001)
    density = a * u - (a + b) * np.logaddexp(0, u)
    mass = np.exp(density - density.max())
    below = np.concatenate([[0.0], np.cumsum((mass[1:] + mass[:-1]) / 2)])
    at = float(np.interp(probability * below[-1], below, u))
    return 1 / (1 + math.exp(-at))
