"""The front of a sweep: nobody leaves it for a difference that the text cannot show, and speed counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from qforge.report.plots import round_values
from qforge.report.sweep import _labels, _row
from qforge.search.front import Variant, ranked
from qforge.types import Cluster, Evaluation, Results


def results(kl: float, noise: float = 0.0, seed: int = 0) -> Results:
    """What `ranked` reads: an evaluation of 40 documents around a divergence."""
    levels = kl + np.random.default_rng(seed).normal(0, noise, 40)
    clusters = [Cluster(100, 200.0, 200.0, 100.0 * float(level), 90) for level in levels]
    return cast(Results, SimpleNamespace(evaluation=Evaluation("t", {}, "e", 4000, {}, clusters, kl_mean=float(levels.mean()))))


def front(*rows: tuple[int, Results, float | None]) -> list[bool]:
    variants = [replace(Variant(str(i), {}, "p"), size_bytes=s, kl_mean=r.evaluation.kl_mean if r.evaluation else None, tokens_per_second=t) for i, (s, r, t) in enumerate(rows)]
    return [v.front for v in ranked(variants, [r for _, r, _ in rows])]


def test_what_cannot_be_told_apart_stays() -> None:
    assert front((1000, results(0.1896, 0.03, 1), 50.0), (1000, results(0.1899, 0.03, 2), 50.0)) == [True, True]
    assert front((1000, results(0.1), 50.0), (1000, results(0.2), 50.0)) == [True, False]
    assert front((900, results(0.1896, 0.03, 1), 50.0), (1000, results(0.1899, 0.03, 2), 50.0)) == [True, False]


def test_speed_keeps_a_variant_on_the_front() -> None:
    """Of another size: those of one size run the same kernels, and what is measured between them is noise."""
    assert front((1000, results(0.1), 50.0), (1010, results(0.2), 70.0)) == [True, True]
    assert front((1000, results(0.1), 50.0), (1010, results(0.2), 51.0)) == [True, False]
    assert front((1000, results(0.1), None), (1010, results(0.2), 70.0)) == [True, False]
    assert front((1000, results(0.1), 50.0), (1000, results(0.2), 70.0)) == [True, False]


def test_no_gates_are_not_said_to_pass() -> None:
    v: dict[str, Any] = dict.fromkeys(Variant.__dataclass_fields__) | {"name": "v", "passed": True, "num_gates": 0, "failed_gates": []}
    assert _row(1, v)[2] == "none"
    assert _row(1, v | {"num_gates": 2})[2] == "passed"


def test_axes_have_round_numbers() -> None:
    assert round_values(0.021, 0.043) == [0.025, 0.03, 0.035, 0.04]
    assert round_values(0.9, 210) == [1, 10, 100]
    assert round_values(0.9, 21) == [1, 2, 5, 10, 20]
    assert round_values(20.1e6, 21.9e6) == [20.5e6, 21e6, 21.5e6]


def test_labels_of_near_points_do_not_touch() -> None:
    found = _labels([(100.0, 100.0), (102.0, 101.0), (101.0, 99.0), (300.0, 50.0)], ["3", "5", "6", "1"])
    assert found[3] == (309.0, 43.0)
    assert all(abs(a[0] - b[0]) >= 11 or abs(a[1] - b[1]) >= 18 for i, a in enumerate(found) for b in found[:i])
