"""Sampling: filters as transformers applies them, frequencies as the distribution says, random numbers by (seed, position)."""

from __future__ import annotations

import math

import pytest
import torch

from qforge.errors import DataError
from qforge.runtime.sampler import draw, uniform
from qforge.runtime.sequence import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def _seen(**params: float) -> set[int]:
    return {draw(LOGITS, SamplingParams(temperature=1.0, **params), seed, 5) for seed in range(400)}  # type: ignore[arg-type]


def test_frequencies_follow_the_distribution() -> None:
    n = 4000
    counts = torch.zeros(5)
    for seed in range(n):
        counts[draw(LOGITS, SamplingParams(temperature=2.0), seed, 1)] += 1
    p = torch.softmax(LOGITS / 2, 0)
    assert ((counts / n - p).abs() < 4.5 * (p * (1 - p) / n).sqrt()).all()


def test_top_k_keeps_the_most_likely() -> None:
    assert _seen(top_k=2) == {4, 0}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p = torch.softmax(LOGITS, 0)
    assert _seen(top_p=float(p[4]) - 1e-3) == {4}
    assert _seen(top_p=float(p[4]) + 1e-3) == {4, 0}


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert _seen(min_p=math.exp(-1) + 1e-3) == {4}
    assert _seen(min_p=math.exp(-1) - 1e-3) == {4, 0}


def test_numbers_are_functions_of_seed_and_position() -> None:
    assert uniform(3, 7) == uniform(3, 7)
    assert len({uniform(s, p) for s in range(20) for p in range(20)}) == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("seed", -1), ("stop", ("",))],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(DataError, match=name.split("_")[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
