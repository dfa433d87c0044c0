"""Layers that fare far worse than others of their kind are named, with an override that the recipe takes; nobody else is."""

from __future__ import annotations

import pytest

from qforge.scheme import parse
from qforge.stages.guards import outliers
from qforge.types import LayerResult


def layers(*errors: float | None, kind: str = "down_proj") -> list[LayerResult]:
    return [LayerResult(f"model.layers.{i}.mlp.{kind}", "int4-g32-sym", 0.1, error, 4.5, None) for i, error in enumerate(errors)]


def test_one_bad_layer_is_named_with_an_override() -> None:
    (sentence,) = outliers(layers(0.06, 0.07, 0.4, 0.05, 0.06))
    assert sentence.startswith("model.layers.2.mlp.down_proj: output error 0.400, 6.7 times")
    parse(sentence.partition("scheme: ")[2].partition("}")[0])


@pytest.mark.parametrize("errors", [(), (None, None), (0.06, 0.4, 0.06), (0.06, 0.07, 0.1, 0.05), (0.001, 0.001, 0.04, 0.001), (0.3, 0.3, 0.3, 0.3)])
def test_what_is_no_outlier_is_not_named(errors: tuple[float | None, ...]) -> None:
    assert outliers(layers(*errors)) == []


def test_kinds_are_compared_among_themselves() -> None:
    assert outliers(layers(0.02, 0.02, 0.02, 0.02) + layers(0.3, 0.3, 0.3, 0.3, kind="o_proj")) == []


def test_one_bad_layer_among_exact_ones_is_named() -> None:
    (sentence,) = outliers(layers(0.0, 0.0, 0.0, 0.12))
    assert sentence.startswith("model.layers.3.mlp.down_proj: output error 0.120, where the median of its kind is 0;")
