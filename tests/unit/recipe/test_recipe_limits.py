"""The text form of limits and gates."""

from __future__ import annotations

import math

import pytest

from qforge.recipe.limits import FIGURES, Budget, Limit, parse_budget, parse_gate, parse_limit


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("<= 1.30", Limit("<=", 1.3)),
        (">=0.70", Limit(">=", 0.7)),
        (" < 2e9 ", Limit("<", 2e9)),
        ("> -.5", Limit(">", -0.5)),
        ("<= 4_000", Limit("<=", 4000.0)),
    ],
)
def test_reads(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit
    assert parse_limit(str(limit)) == limit


@pytest.mark.parametrize("text", ["about one", "", "<=", "1.3", "<= ", "== 1", "<= 1 2", "<= nan", "<= inf", "<= 1e999", "=< 1", 1.3, None, True, ["<= 1"], "<= 1;", "< = 1"])
def test_refuses(text: object) -> None:
    with pytest.raises(ValueError, match="no limit"):
        parse_limit(text)


@pytest.mark.parametrize(("text", "good", "bad"), [("<= 1", [1.0, 0.0, -5.0], [1.0000001, math.nan]), ("< 1", [0.5], [1.0]), (">= 1", [1.0, 2.0], [0.999]), ("> 1", [1.1], [1.0])])
def test_allows(text: str, good: list[float], bad: list[float]) -> None:
    limit = parse_limit(text)
    assert all(limit.allows(v) for v in good)
    assert not any(limit.allows(v) for v in bad)
    assert not limit.allows(math.nan)
    assert limit.upper == ("<" in text)


def test_gates() -> None:
    assert parse_gate("perplexity_ratio <= 1.02") == ("perplexity_ratio", Limit("<=", 1.02))
    assert parse_gate("kl_mean<.1") == ("kl_mean", Limit("<", 0.1))
    for text in ("", "<= 1", "kl_mean", "kl mean <= 1", "kl_mean is 1"):
        with pytest.raises(ValueError, match="no gate"):
            parse_gate(text)
    with pytest.raises(ValueError, match="no limit"):
        parse_gate("kl_mean == 1")
    assert len(set(FIGURES)) == len(FIGURES)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("4.5 bits", Budget(bits=4.5)),
        ("4bit", Budget(bits=4.0)),
        ("110 MB", Budget(size_bytes=110_000_000)),
        ("1.5GiB", Budget(size_bytes=3 << 29)),
        ("kl <= 0.05", Budget(divergence=0.05)),
        ("KL_mean<=5e-2", Budget(divergence=0.05)),
    ],
)
def test_reads_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "4.5", "0 bits", "-1 bits", "0 MB", "kl", "kl <= 0", "kl >= 0.05", "kl < 0.05", "kl <= 1e999", "perplexity <= 3", 4.5, None])
def test_refuses_budgets(text: object) -> None:
    with pytest.raises(ValueError, match="no budget"):
        parse_budget(text)
