"""results.json and comparison.json keep to their published schemas, and the schemas are strict enough to notice when they do not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator

DOCS = Path(__file__).resolve().parents[3] / "docs"


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / f"{name}.schema.json").read_text())
    Draft202012Validator.check_schema(found)
    return found


def test_results_keep_to_their_schema(results: dict[str, Any]) -> None:
    jsonschema.validate(results, schema("results"), cls=Draft202012Validator)
    assert schema("results")["properties"]["schema_version"] == {"const": 1}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("evaluation", "kl_mean"), "small"),
        (("evaluation", "kl_mean_ci95"), [1.0]),
        (("evaluation", "candidate"), {"nll": 1.0}),
        (("evaluation", "clusters", 0, "tokens"), 1.5),
        (("evaluation", "clusters", 0, "kl_sum"), -0.5),
        (("evaluation", "top1_agreement"), 1.5),
        (("evaluation", "surprise"), 1),
        (("artifact", "size_bytes"), "small"),
        (("layers", 0, "relative_error"), -1),
        (("gates", 0, "passed"), "yes"),
        (("exports", 0, "verified_by", 0, "engine"), None),
        (("schema_version",), 2),
        (("layers",), None),
    ],
)
def test_what_breaks_the_contract_is_noticed(results: dict[str, Any], path: tuple[Any, ...], value: object) -> None:
    broken = copy.deepcopy(results)
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema("results"), cls=Draft202012Validator)


@pytest.mark.parametrize("key", ["recipe", "evaluation", "gates", "environment"])
def test_no_key_may_be_left_out(results: dict[str, Any], key: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({k: v for k, v in results.items() if k != key}, schema("results"), cls=Draft202012Validator)
