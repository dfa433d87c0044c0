"""results.json as `compare` reads it: what is no results.json is one message, whatever is wrong with it; whatever passes can be compared and shown."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from evaluations import evaluation, task

from qforge.errors import DataError
from qforge.evaluate.compare import compare
from qforge.evaluate.sides import parse
from qforge.report import comparison
from qforge.report.html import comparison_html

ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 7.5, -0.25, 1e308, 5e-324, 10**400, "text", "", [], [1], [{}], {}, {"a": 1}, {"a": {"b": [None]}}, [[1.0, 2.0]], float("nan"))


def results(clusters: int = 10) -> dict[str, Any]:
    return {
        "qforge_version": "0.1.0",
        "recipe": {"version": 1, "quantize": {"method": ["gptq"]}, "export": [{"format": "gguf"}, {"format": "onnx"}]},
        "model": {"source": "demo", "sha256": "cd" * 32, "parameters": 1000},
        "artifact": {"size_bytes": 400, "bits_per_weight": 4.25},
        "calibration": {"source": "builtin", "likeness": {"warning": None}},
        "evaluation": {**evaluation(clusters=clusters), "tasks": {"sums": task("110")}},
        "exports": [{"format": "gguf", "lossless": True, "verified_by": [{"engine": "llama.cpp", "version": "1", "weights_equal": True}]}, {"format": "onnx"}],
        "gates": [{"name": "kl_mean", "limit": "<= 1", "value": 0.1, "passed": True, "on": "error", "interval": None}],
        "layers": [{"name": f"layer{i}", "scheme": "int4-g64-sym", "relative_error": 0.1} for i in range(2)],
        "adapters": [{"source": "a", "weight": 1.0}],
        "environment": {"torch": "2.13.0"},
        "schema_version": 1,
    }


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key within."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def shown(a: str, b: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(compare(parse(a, "a.json"), parse(b, "b.json"), ["warn: perplexity_ratio <= 1.01", "warn: perplexity <= 9"]).to_json())
    assert all(make(data) for make in (comparison.text, comparison.markdown, comparison.junit, comparison_html))
    return data


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_changed_is_refused_or_compared(seed: int) -> None:
    draw, good = random.Random(seed), json.dumps(results())
    refused = 0
    for _ in range(60):
        data = copy.deepcopy(results())
        for _ in range(draw.randint(1, 2)):
            tree, key = draw.choice(list(places(data)))
            if draw.random() < 0.2 and isinstance(tree, dict):
                del tree[key]
            else:
                tree[key] = copy.deepcopy(draw.choice(ODD))
        bad = json.dumps(data)
        for pair in ((good, bad), (bad, good), (bad, bad)):
            try:
                shown(*pair)
            except DataError:
                refused += 1
    assert 20 < refused < 170


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("adapters",), [1], r"adapters\[0\] is 1"),
        (("layers",), [{}], r"layers\[0\]\.name: field required"),
        (("layers",), [1], r"layers\[0\] is 1"),
        (("layers", 0, "relative_error"), "0.1", r"layers\[0\]\.relative_error is '0.1'"),
        (("exports",), [{}], r"exports\[0\]\.format"),
        (("environment",), "linux", "environment is 'linux'"),
        (("calibration",), "builtin", "calibration is 'builtin'"),
        (("evaluation", "clusters", 0, "nll_candidate"), 1e308, r"clusters\[0\]\.nll_candidate is 1e\+308, too much for"),
        (("evaluation", "clusters", 0, "kl_sum"), 10**400, "too large a number"),
        (("evaluation", "clusters", 0, "kl_sum"), -0.5, r"clusters\[0\]\.kl_sum is -0.5"),
        (("evaluation", "clusters", 0, "agree"), 1000, r"clusters\[0\]\.agree is 1000, too much for"),
        (("evaluation", "tokens"), 5, "tokens is 5, and the clusters hold"),
        (("evaluation", "candidate", "perplexity"), "9", "candidate.perplexity is '9'"),
        (("evaluation", "tasks", "sums", "metrics", "acc", "candidate"), 0.3, r"tasks\.sums\.metrics\.acc\.right has 2 of 3 questions right, and candidate is 0\.3"),
        (("evaluation", "kl_mean"), -0.5, "kl_mean is -0.5"),
        (("schema_version",), 99, "schema_version is 99"),
    ],
)
def test_what_is_wrong_is_said(path: tuple[Any, ...], value: object, message: str) -> None:
    data = results()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(DataError, match=message):
        parse(json.dumps(data), "a.json")


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    text = json.dumps({**results(), "recipe": "here"}).replace('"here"', '{"a":' * depth + "1" + "}" * depth)
    with pytest.raises(DataError, match="nested more than 64 levels deep"):
        parse(text, "a.json")


def test_a_file_of_a_later_or_an_earlier_release_is_read() -> None:
    data = {**results(), "of_tomorrow": 1}
    del data["environment"], data["evaluation"]["greedy"]
    assert parse(json.dumps(data), "a.json").results == data
