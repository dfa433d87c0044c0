"""Sampling: filters as transformers applies them, frequencies as the distribution says, random numbers by (seed, position)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qforge.errors import DataError
from qforge.ops.native_module import module
from qforge.runtime.sampler import draw, sample, uniform
from qforge.runtime.sequence import Draw, SamplingParams

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


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, {0}), (0.5, {0, 1}), (0.75, {0, 1, 2}), (0.5 + 1e-6, {0, 1, 2})])
def test_a_set_that_reaches_top_p_exactly_is_enough(top_p: float, kept: set[int]) -> None:
    native: Any = module()
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0, -1e30])
    assert {native.draw(logits.data_ptr(), 5, 1.0, 0, top_p, 0.0, seed, 2) for seed in range(200)} == kept
    assert {draw(logits, SamplingParams(temperature=1.0, top_p=top_p), seed, 2) for seed in range(200)} == kept


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert _seen(min_p=math.exp(-1) + 1e-3) == {4}
    assert _seen(min_p=math.exp(-1) - 1e-3) == {4, 0}


def test_numbers_are_functions_of_seed_and_position() -> None:
    assert uniform(3, 7) == uniform(3, 7)
    assert len({uniform(s, p) for s in range(20) for p in range(20)}) == 400


@settings(max_examples=300, deadline=None)
@given(
    vocabulary=st.integers(1, 4000), spread=st.floats(0, 8), ties=st.booleans(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]), top_k=st.sampled_from([0, 1, 5, 50, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]), min_p=st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
def test_the_native_draw_is_the_reference(vocabulary: int, spread: float, ties: bool, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    native: Any = module()
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed % 2**31)) * spread
    logits = logits.round() if ties else logits
    near = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p * f), min_p=min_p) for f in (1, 1 - 1e-12, 1 + 1e-12)
    ]  # equal tokens may end at top_p: sums differ by rounding
    assert native.uniform(seed, position) == uniform(seed, position)
    assert native.draw(logits.data_ptr(), vocabulary, temperature, top_k, top_p, min_p, seed, position) in {draw(logits, params, seed, position) for params in near}


@pytest.mark.parametrize("n", [1, 7, 64, 100, 49152])
def test_sums_of_weights_have_the_same_bits_on_each_instruction_set(n: int) -> None:
    native: Any = module()
    logits = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 40
    most = float(logits.max())
    sums = {isa: native.Context(1, isa).weight_sum(logits.data_ptr(), n, most, 1 / 0.8) for isa in native.instruction_sets()}
    assert len(set(sums.values())) == 1, sums
    assert next(iter(sums.values())) == pytest.approx(float(torch.exp((logits.double() - most) / 0.8).sum()), rel=1e-13)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 100, 49152])
def test_the_native_choice_without_temperature_is_the_first_of_the_most_likely(vocabulary: int) -> None:
    native: Any = module()
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)).round()
    assert native.draw(logits.data_ptr(), vocabulary, 0.0, 0, 1.0, 0.0, 0, 0) == int((logits == logits.max()).nonzero()[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("seed", -1), ("stop", ("",))],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(DataError, match=name.split("_")[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_have_no_token(bad: float, temperature: float) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    logits[1] = bad
    found = sample(logits, [Draw(SamplingParams(temperature=temperature), 3, 5)] * 2)
    assert found[0] >= 0
    assert found[1] == -1
