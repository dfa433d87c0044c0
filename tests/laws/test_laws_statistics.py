"""Intervals cover as often as they say, on data with known truth and correlation inside documents; verdicts err as rarely as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qforge.evaluate.divergence import cluster_owners
from qforge.evaluate.statistics import MIN_CLUSTERS, MIN_RESAMPLED, Mean, Verdict, _beta_quantile, _student_975, mean, needs_tokens, paired_shares, quantile, share, verdict
from qforge.evaluate.task_rows import _change
from qforge.types import TaskMetric

Floats = NDArray[np.float64]
TRIALS = 1000


def sizes(rng: np.random.Generator, n: int) -> Floats:
    return rng.integers(50, 500, n).astype(float)


def differences(rng: np.random.Generator, n: int, truth: float = 0.05) -> tuple[Floats, Floats, float]:
    """Paired differences of negative log-likelihood: an effect of the document, and noise of its tokens."""
    t = sizes(rng, n)
    return rng.normal(truth, 0.05, n) * t + rng.normal(0, 0.5, n) * np.sqrt(t), t, truth


def divergences(rng: np.random.Generator, n: int) -> tuple[Floats, Floats, float]:
    """KL divergence: positive, skewed inside documents and between them, larger in short documents."""
    t = sizes(rng, n)
    factor = 1 + 0.5 * (np.arange(50, 500) < 200)
    level = np.exp(rng.normal(0, 0.5, n)) * factor[t.astype(int) - 50]
    return rng.gamma(0.3 * t, level / 0.3), t, math.exp(0.125) * float((np.arange(50, 500) * factor).sum() / np.arange(50, 500).sum())


def agreements(rng: np.random.Generator, n: int) -> tuple[Floats, Floats, float]:
    """Agreement: a share that differs between documents."""
    t = sizes(rng, n)
    return rng.binomial(t.astype(int), rng.beta(20, 4, n)).astype(float), t, 20 / 24


@pytest.mark.parametrize("n", [2, 4, 7, 8, 20, 60])
@pytest.mark.parametrize("draw", [differences, divergences, agreements])
def test_intervals_cover(draw: Callable[[np.random.Generator, int], tuple[Floats, Floats, float]], n: int) -> None:
    rng = np.random.default_rng(n)
    covered = naive = 0
    for _ in range(TRIALS):
        values, t, truth = draw(rng, n)
        m = mean(values, t)
        assert m.interval is not None
        covered += m.interval[0] <= truth <= m.interval[1]
        # An interval that takes tokens for independent, from the spread of a token inside its document.
        token_error = 0.5 / math.sqrt(t.sum())
        naive += abs(m.value - truth) <= 1.96 * token_error
    assert 0.93 <= covered / TRIALS <= (0.97 if n >= MIN_RESAMPLED else 0.985)  # Student's interval of a few is a little wide
    if draw is differences and n >= 8:
        assert naive / TRIALS < 0.85


@pytest.mark.parametrize("documents", [2, 4, 7, 8])
def test_a_text_of_few_documents_is_not_taken_for_one_of_many_windows(documents: int) -> None:
    """Ten windows a document, an effect of the document: equal models are called worse in one comparison of forty."""
    rng, owners = np.random.default_rng(documents), cluster_owners([d for d in range(documents) for _ in range(10)])[0]
    worse = covered = 0
    for _ in range(TRIALS):
        effect = np.repeat(rng.normal(0, 0.05, documents), 10) * 255
        m = mean(np.bincount(owners, weights=effect + rng.normal(0, 0.5 * math.sqrt(255), 10 * documents)), np.bincount(owners, weights=np.full(10 * documents, 255.0)))
        assert m.interval is not None
        covered += m.interval[0] <= 0 <= m.interval[1]
        worse += verdict(m, 1e-4).word == "worse"
    assert 0.93 <= covered / TRIALS <= 0.985
    assert worse <= 0.035 * TRIALS


@pytest.mark.parametrize("n", [4, 8, 20])
def test_a_long_tail_between_documents_costs_what_is_stated(n: int) -> None:
    """Exponential differences around zero: the interval misses on the side of the tail less than nine times in a hundred, on the other no more often than promised."""
    rng, t = np.random.default_rng(n), np.full(n, 100.0)
    ends = [mean((rng.exponential(1, n) - 1) * t, t).interval or (0.0, 0.0) for _ in range(TRIALS)]
    assert sum(high < 0 for _, high in ends) <= 0.09 * TRIALS
    assert sum(low > 0 for low, _ in ends) <= 0.025 * TRIALS


def token_divergences(rng: np.random.Generator, n: int, sigma: float) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Per-token divergences of n documents of 50 to 500 tokens, log-normal around a level that differs between documents by `sigma`."""
    t = sizes(rng, n)
    owner = np.repeat(np.arange(n), t.astype(int))
    return np.exp(rng.normal(0, sigma, n)[owner] + rng.normal(0, 1.2, len(owner))), owner, t


@pytest.mark.parametrize(
    ("n", "share", "sigma"), [(20, 0.9, 0.6), (20, 0.99, 0.6), (60, 0.5, 0.6), (60, 0.9, 0.6), (60, 0.99, 0.6), (60, 0.999, 0.6), (60, 0.99, 0.0), (200, 0.999, 0.6)]
)
def test_intervals_of_quantiles_cover(n: int, share: float, sigma: float) -> None:
    rng = np.random.default_rng(17)
    truth = math.exp(NormalDist(0, math.hypot(sigma, 1.2)).inv_cdf(share))
    covered = naive = 0
    for _ in range(TRIALS):
        values, owner, t = token_divergences(rng, n, sigma)
        value, interval = quantile(values, owner, t, share)
        assert interval is not None
        assert interval[0] <= value <= interval[1]
        covered += interval[0] <= truth <= interval[1]
        off = 1.96 * math.sqrt(share * (1 - share) / len(values))
        naive += float(np.quantile(values, share - off)) <= truth <= float(np.quantile(values, min(1.0, share + off)))
    assert 0.93 <= covered / TRIALS <= 0.97
    if sigma and share < 0.999:
        assert naive / TRIALS < 0.9


def test_a_tail_of_a_few_tokens_has_no_interval() -> None:
    values, owner, t = token_divergences(np.random.default_rng(2), 20, 0.6)
    assert quantile(values, owner, t, 0.999)[1] is None  # about five tokens lie above
    assert quantile(values, owner, t, 0.001)[1] is None
    assert quantile(values, owner, t, 0.99)[1] is not None
    assert quantile(values[owner < 7], owner[owner < 7], t[:7], 0.5)[1] is None
    assert quantile(np.ones(5000), np.repeat(np.arange(20), 250), np.full(20, 250.0), 0.99) == (1.0, (1.0, 1.0))


@settings(max_examples=60, deadline=None)
@given(a=st.floats(0.3, 3000), b=st.floats(0.3, 3000), probability=st.sampled_from([0.025, 0.05, 0.5, 0.975]))
def test_beta_quantiles_are_those_of_a_plain_sum(a: float, b: float, probability: float) -> None:
    """Drawn: the share of two gamma variables; the quantile cuts off as much of 200,000 draws as it says."""
    draws = np.random.default_rng(1).gamma(a, size=200_000)
    other = np.random.default_rng(2).gamma(b, size=200_000)
    assert float((draws / (draws + other) <= _beta_quantile(probability, a, b)).mean()) == pytest.approx(probability, abs=0.005)


@pytest.mark.parametrize(("freedom", "table"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)])
def test_students_quantiles_are_the_printed_ones(freedom: float, table: float) -> None:
    assert _student_975(freedom) == pytest.approx(table, abs=6e-4)


def test_a_verdict_errs_as_rarely_as_it_says() -> None:
    rng = np.random.default_rng(1)
    words = [verdict(mean(*differences(rng, 40, truth=0.0)[:2]), 0.001).word for _ in range(TRIALS)]
    assert words.count("worse") <= 0.04 * TRIALS
    assert words.count("better") <= 0.04 * TRIALS
    assert words.count("not enough data") > 0.9 * TRIALS
    clear = [verdict(mean(*differences(rng, 40, truth=sign * 0.06)[:2]), 0.02).word for sign in (1, -1) for _ in range(100)]
    assert set(clear[:100]) == {"worse"}
    assert set(clear[100:]) == {"better"}
    equal = [verdict(mean(*differences(rng, 400, truth=0.0)[:2]), 0.02).word for _ in range(100)]
    assert set(equal) == {"same"}


@pytest.mark.parametrize("n", [3, 5, 8, 12, 20, 40])
def test_needs_tokens_is_as_right_as_it_says(n: int) -> None:
    """The middle of many answers is what brings the half-width to the margin; a single answer's range holds that in four of five texts."""
    rng, margin = np.random.default_rng(n), 0.004
    long = [mean(*differences(rng, 600)[:2]) for _ in range(20)]
    truth = float(np.median([m.tokens * (m.half_width / margin) ** 2 for m in long]))
    answers = [needs_tokens(mean(*differences(rng, n)[:2]), margin) for _ in range(400)]
    assert truth / 1.5 < np.median([about for about, _ in answers]) < truth * 1.5
    ranges = [between for _, between in answers if between is not None]
    assert all(low <= about <= high for about, (low, high) in zip([a for a, _ in answers], ranges, strict=True))
    assert 0.75 <= np.mean([low <= truth <= high for low, high in ranges]) <= 0.92


def test_without_a_spread_there_is_no_interval() -> None:
    rng = np.random.default_rng(0)
    values, t, _ = differences(rng, MIN_CLUSTERS - 1)
    assert mean(values, t).interval is not None
    assert quantile(values, np.arange(len(t)), t, 0.5)[1] is None
    assert mean([3.0], [10.0]) == Mean(0.3, math.inf, None, 1, 10)
    assert verdict(mean([3.0], [10.0]), 0.01) == Verdict("not enough data", 200)
    assert str(verdict(mean([3.0], [10.0]), 0.01)) == "not enough data (needs about 200 tokens)"
    assert str(Verdict("not enough data", 12000, (8000, 25000))) == "not enough data (needs about 12,000 tokens; 8,000 to 25,000)"
    assert str(Verdict("same")) == "same"


@settings(max_examples=30, deadline=None)
@given(n=st.integers(8, 60), seed=st.integers(0, 2**32 - 1), factor=st.floats(0.01, 100), shift=st.floats(-3, 3))
def test_intervals_follow_their_data(n: int, seed: int, factor: float, shift: float) -> None:
    """Scaling and shifting the values scales and shifts the interval; negating mirrors it; the same data give the same interval; the value lies inside."""
    values, t, _ = differences(np.random.default_rng(seed), n)
    low, high = mean(values, t).interval or (0, 0)
    assert low < mean(values, t).value < high
    assert mean(values, t).interval == (low, high)
    assert mean(values * factor + shift * t, t).interval == pytest.approx((low * factor + shift, high * factor + shift), rel=1e-6, abs=1e-6)
    assert mean(-values, t).interval == pytest.approx((-high, -low), rel=1e-9)


def test_equal_values_have_an_interval_of_no_width() -> None:
    t = np.arange(1.0, 30.0)
    assert mean(0 * t, t).interval == (0.0, 0.0)
    assert verdict(mean(0 * t, t), 1e-3) == Verdict("same")
    assert mean(0.25 * t, t).interval == (0.25, 0.25)
    assert verdict(mean([0.0, 0.0], [5.0, 5.0]), 1e-3) == Verdict("same")


def test_many_clusters_are_pooled_without_changing_the_interval_much() -> None:
    values, t, _ = differences(np.random.default_rng(3), 9001)
    pooled = mean(values, t)
    error = float(np.std(values - pooled.value * t) * math.sqrt(len(t)) / t.sum())
    assert pooled.clusters == 9001
    assert pooled.half_width == pytest.approx(1.96 * error, rel=0.08)


@pytest.mark.parametrize("questions", [10, 20, 50, 100, 400])
@pytest.mark.parametrize(("lost", "gained"), [(0.02, 0.0), (0.03, 0.01), (0.05, 0.02), (0.2, 0.1)])
def test_intervals_of_paired_answers_cover_also_where_few_or_none_differ(questions: int, lost: float, gained: float) -> None:
    rng = np.random.default_rng(questions)
    covered = 0
    known: dict[tuple[int, int], tuple[float, float]] = {}
    for _ in range(TRIALS):
        u = rng.random(questions)
        before, after = u >= gained, (u < gained) | (u >= gained + lost)  # of the first share of u only the second side knows the answer, of the next only the first
        counts = (int((before & ~after).sum()), int((after & ~before).sum()))
        if counts not in known:
            a, b = (TaskMetric(0, float(side.mean()), right="".join(map(str, side.astype(int)))) for side in (before, after))
            interval = _change(a, b, questions).interval
            assert interval is not None
            known[counts] = interval
        low, high = known[counts]
        covered += low <= gained - lost <= high
    assert covered / TRIALS >= 0.93


def test_paired_answers_are_told_alike_both_ways_and_end_where_shares_end() -> None:
    for gained, lost, n in ((0, 0, 20), (3, 1, 20), (20, 0, 20), (5, 0, 9)):
        one, other = paired_shares(gained, lost, n), paired_shares(lost, gained, n)
        assert one.interval is not None
        assert other.interval is not None
        assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]), abs=1e-9)
        assert -1 <= one.interval[0] <= one.value <= one.interval[1] <= 1
        assert one.error == other.error > 0
        assert one.half_width > 0.1
    assert paired_shares(0, 0, 20).interval == pytest.approx((-0.161125, 0.161125), abs=1e-5)  # of none: z^2 / (n + z^2)


@pytest.mark.parametrize(("n", "size"), [(8, 60), (8, 200), (20, 60), (40, 60)])
@pytest.mark.parametrize("none_seen", [False, True])
def test_a_share_that_no_token_was_seen_to_have_covers(n: int, size: int, none_seen: bool) -> None:
    """Texts of which none disagrees, where disagreement is rare and differs between documents; and the other way round."""
    rng = np.random.default_rng(n + size)
    trials = covered = 0
    while trials < 200:
        t = rng.integers(size // 2, size * 3 // 2, n).astype(float)
        truth = rng.uniform(0, 3 / t.sum())
        seen = rng.binomial(t.astype(int), rng.gamma(1.0, truth, n).clip(0, 1)).astype(float)
        if seen.any():
            continue
        found = share(seen if none_seen else t, t).share
        assert found is not None
        trials += 1
        covered += found[0] <= (truth if none_seen else 1 - truth) <= found[1]
    assert covered / trials >= 0.95


def test_a_share_in_between_is_a_mean() -> None:
    values, t, _ = agreements(np.random.default_rng(1), 12)
    assert share(values, t) == mean(values, t)
    assert share([3.0], [9.0]) == mean([3.0], [9.0])
