"""What difference between two candidates a text can show: after a run from what was measured, before it from the number of tokens alone."""

from __future__ import annotations

import math

from qforge.evaluate.statistics import DESIGN_EFFECT, NORMAL_975, Mean, exponential

# A 95 % interval excludes zero in four of five comparisons when the difference is that many standard errors.
DETECTABLE = NORMAL_975 + 0.8416212335729143
EXPECTED_KL = 0.05  # nats: a 4-bit model's, about


def expected(tokens: int, kl: float = EXPECTED_KL) -> float:
    """The smallest difference of perplexity between two candidates (0.01: one percent) that a text of so many tokens is expected to show in four of five comparisons.

    To second order a divergence of `kl` nats means that a token's log-likelihood changes with a variance of 2 kl: KL is half of the variance of the log-ratio.
    """
    return math.expm1(DETECTABLE * math.sqrt(2 * DESIGN_EFFECT * 2 * kl / tokens))


def detectable(mean: Mean) -> float:
    """The smallest difference that an interval of such a width excludes in four of five comparisons; infinite without an interval."""
    return DETECTABLE / NORMAL_975 * mean.half_width


def growth(nats: float) -> float:
    """What a difference of log-perplexity multiplies a perplexity by, less one."""
    return math.expm1(nats) if nats < 1 else exponential(nats) - 1


def promise(tokens: int) -> str:
    """One sentence for before the run: the smallest difference of perplexity that so many tokens are expected to show."""
    return f"evaluation: {tokens:,} tokens; expected to show differences of perplexity from {expected(tokens):.1%} on (two candidates with a KL divergence of about {EXPECTED_KL})"


def measured(log_ratio: Mean, kl: Mean, agreement: Mean) -> dict[str, float]:
    """The smallest differences between two candidates that this text would show in four of five comparisons.

    Two candidates whose errors are unrelated differ by sqrt(2) times the standard error that each has against the reference; related ones (the same recipe, another
    calibration) differ by less, so that `compare` mostly shows smaller differences. Without clusters to resample (a single one) nothing is claimed.

    Args:
        log_ratio: log-likelihood difference of candidate and reference, nats per token.
        kl: KL divergence, nats per token.
        agreement: share of positions with the same first choice.
    """
    if not math.isfinite(log_ratio.half_width):
        return {}
    perplexity, divergence, share = (math.sqrt(2) * detectable(m) for m in (log_ratio, kl, agreement))
    return {"perplexity_ratio": growth(perplexity), "kl_mean": divergence, "top1_agreement": share}
