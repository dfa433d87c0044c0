"""What difference between two candidates a text can show: after a run from what was measured, before it from the number of tokens alone."""

from __future__ import annotations

import math

from qforge.evaluate.statistics import Mean

# A 95 % interval excludes zero in four of five comparisons when the difference is that many standard errors.
DETECTABLE = 1.959963984540054 + 0.8416212335729143


def measured(log_ratio: Mean, kl: Mean, agreement: Mean) -> dict[str, float]:
    """The smallest differences between two candidates that this text would show in four of five comparisons.

    Two candidates whose errors are unrelated differ by sqrt(2) times the standard error that each has against the reference; related ones (the same recipe, another
    calibration) differ by less, so that `compare` mostly shows smaller differences. Without clusters to resample (a single one) nothing is claimed.

    Args:
        log_ratio: log-likelihood difference of candidate and reference, nats per token.
        kl: KL divergence, nats per token.
        agreement: share of positions with the same first choice.
    """
    if not math.isfinite(log_ratio.error):
        return {}
    perplexity, divergence, share = (DETECTABLE * math.sqrt(2) * m.error for m in (log_ratio, kl, agreement))
    return {"perplexity_ratio": math.expm1(perplexity), "kl_mean": divergence, "top1_agreement": share}
