"""The knapsack's choices are the best there are: compared with all combinations."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qforge.stages import knapsack
from qforge.stages.knapsack import Knapsack, Option

option = st.tuples(st.integers(0, 12).map(lambda n: 6 * n), st.floats(0, 10, allow_nan=False))
problems = st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=4)


def totals(units: list[list[Option]], places: list[int]) -> tuple[int, float]:
    chosen = [options[place] for options, place in zip(units, places, strict=True)]
    return sum(size for size, _ in chosen), sum(cost for _, cost in chosen)


def everything(units: list[list[Option]]) -> list[tuple[int, float]]:
    return [totals(units, list(places)) for places in itertools.product(*(range(len(options)) for options in units))]


@given(problems, st.integers(0, 300))
def test_nothing_within_the_capacity_costs_less(units: list[list[Option]], capacity: int) -> None:
    solved = Knapsack(units)
    feasible = [cost for size, cost in everything(units) if size <= capacity]
    places = solved.within(capacity)
    assert (places is None) == (not feasible)
    if places is not None:
        size, cost = totals(units, places)
        assert size <= capacity
        assert cost == pytest.approx(min(feasible), abs=1e-9)
        assert solved.cost(capacity) == pytest.approx(cost, abs=1e-9)
    else:
        assert solved.cost(capacity) == math.inf


@given(problems, st.floats(0, 40))
def test_nothing_smaller_keeps_the_cost(units: list[list[Option]], limit: float) -> None:
    places = Knapsack(units).reaching(limit)
    keeping = [size for size, cost in everything(units) if cost <= limit]
    if places is None:
        assert not [cost for _, cost in everything(units) if cost < limit - 1e-9]
        return
    size, cost = totals(units, places)
    assert cost <= limit + 1e-9
    assert size <= min(keeping, default=size)


@given(problems, st.integers(0, 300))
def test_coarser_units_never_exceed_the_capacity(units: list[list[Option]], capacity: int) -> None:
    with mock.patch.object(knapsack, "STATES", 7):
        solved = Knapsack(units)
    places = solved.within(capacity)
    assert (places is None) == (capacity < solved.smallest)
    if places is not None:
        size, cost = totals(units, places)
        assert size <= capacity
        assert cost >= min(c for s, c in everything(units) if s <= capacity) - 1e-9
