"""Recipe gates test the point value and show the interval; nothing passes unmeasured."""

from __future__ import annotations

import pytest

from qforge.errors import RecipeError
from qforge.evaluate.gates import check, figures
from qforge.types import Cluster, Evaluation, GateResult


def evaluation(**changes: object) -> Evaluation:
    known: dict[str, object] = {
        "perplexity_ratio": 1.02,
        "perplexity_ratio_ci95": (1.01, 1.03),
        "kl_mean": 0.05,
        "kl_p99": 0.9,
        "top1_agreement": 0.9,
        **changes,
    }
    return Evaluation("0" * 64, {}, "ours 1", 10, {"perplexity": 12.0, "nll": 2.48}, [Cluster(10, 24.8)], **known)  # type: ignore[arg-type]


def test_values_decide_and_intervals_are_shown() -> None:
    found = figures(evaluation(), size_ratio=0.31, bits_per_weight=None)
    assert set(found) == {"size_ratio", "perplexity", "perplexity_ratio", "kl_mean", "kl_p99", "top1_agreement"}
    got = check(found, {"perplexity_ratio": ("<= 1.02", "error"), "kl_mean": ("< 0.05", "warn"), "top1_agreement": (">= 0.70", "error"), "size_ratio": ("<= .3", "off")})
    assert got == [
        GateResult("perplexity_ratio", "<= 1.02", 1.02, True, "error", (1.01, 1.03)),
        GateResult("kl_mean", "< 0.05", 0.05, False, "warn", None),
        GateResult("top1_agreement", ">= 0.70", 0.9, True, "error", None),
    ]


def test_a_figure_that_was_not_measured_is_an_error() -> None:
    found = figures(evaluation(perplexity_ratio=None, kl_mean=None, kl_p99=None, top1_agreement=None))
    with pytest.raises(RecipeError, match=r"gates\.kl_mean: this figure was not measured; measured are perplexity"):
        check(found, {"kl_mean": ("<= 1", "error")})
    with pytest.raises(RecipeError, match="measured are none"):
        check(figures(None), {"perplexity": ("<= 1", "warn")})
