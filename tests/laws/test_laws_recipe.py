"""Any recipe, written out and read again, is the same recipe with the same hash; no text makes the reader fail in another way than with a RecipeError."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qforge.errors import RecipeError
from qforge.recipe import FORMATS, METHODS, load_recipe
from qforge.recipe.limits import FIGURES
from qforge.scheme import PRESETS
from qforge.yaml_text import yaml_text

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=12)
schemes = st.sampled_from([*PRESETS, "int4-g64-sym", "int3-channel-asym", "int4-g32-offset@u6/g256:f16", "fp8-e4m3-block128", "int8-g32-sym+int8-token-static"])
sizes = st.none() | st.integers(1, 2**45) | st.integers(1, 99).map("{}GiB".format)
limits = st.builds("{} {}".format, st.sampled_from(["<=", "<", ">=", ">"]), st.floats(-1e9, 1e9))


def mappings(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def listed(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, max_size=3)


methods = st.one_of(st.sampled_from([m for m in METHODS if m != "auto"]), st.just(["awq", "gptq"]), st.just(["rtn"]))
budgets = st.one_of(st.integers(2, 8).map("{} bits".format), st.integers(1, 99).map("{}.5 MB".format), st.floats(1e-9, 9).map("kl <= {}".format))
quantize = st.one_of(
    st.fixed_dictionaries({"method": methods, "scheme": schemes}), st.fixed_dictionaries({"method": st.just("auto"), "budget": budgets}, optional={"candidates": listed(schemes)})
).flatmap(
    lambda chosen: st.fixed_dictionaries(
        {name: st.just(value) for name, value in chosen.items()},
        optional={
            "ignore": listed(words),
            "overrides": listed(st.fixed_dictionaries({"match": words, "scheme": schemes})),
            "options": mappings(
                damping=st.floats(0, 1, exclude_min=True), act_order=st.booleans(), scale_search=st.booleans(), group_fallback=st.sampled_from(["error", "adjust", "ignore"])
            ),
        },
    )
)
recipes = st.fixed_dictionaries(
    {"version": st.just(1), "model": st.fixed_dictionaries({"source": words}, optional={"revision": st.none() | words, "trust_remote_code": st.booleans()}), "quantize": quantize},
    optional={
        "adapters": listed(st.fixed_dictionaries({"source": words}, optional={"weight": st.floats(-9, 9) | st.integers(-9, 9)})),
        "calibration": mappings(source=words, samples=st.integers(1, 9999), sequence_length=st.integers(2, 9999), seed=st.integers(0, 2**40)),
        "export": st.lists(st.fixed_dictionaries({"format": st.sampled_from(FORMATS)}, optional={"optional": st.booleans()}), unique_by=lambda e: e["format"], max_size=3),
        "evaluate": mappings(text=words, window=st.integers(2, 9999), tasks=listed(words)),
        "gates": st.dictionaries(st.sampled_from(FIGURES), limits | st.fixed_dictionaries({"limit": limits, "on": st.sampled_from(["error", "warn", "off"])}), max_size=3),
        "run": mappings(
            threads=st.none() | st.integers(1, 64),
            memory_limit=st.none() | st.integers(1, 2**45) | st.integers(1, 99).map("{}GiB".format),
            device=st.sampled_from(["cpu", "cuda:1"]),
        ),
    },
)
scraps = st.lists(st.sampled_from(["version: 1\n", "model: ", "{source: demo}", "\n", "quantize:\n", "  method: ", "rtn", "[", "]", "- ", "&a ", "*a", "!!x", "#", '"'])).map(
    "".join
)
relaxed = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@example({"version": 1, "model": {"source": "1e3"}, "quantize": {"method": "rtn", "scheme": "w4a16", "ignore": ["0E0", "on", "0o7", ".5", "~", "1_0"]}})
@given(recipes)
def test_written_and_read_again_a_recipe_is_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(values))
    recipe = load_recipe(path)
    for text in (json.dumps(recipe.to_dict()), json.dumps(recipe.to_dict(), ensure_ascii=False), yaml_text(recipe.to_dict())):
        path.write_text(text)
        again = load_recipe(path)
        assert again == recipe
        assert again.sha256 == recipe.sha256


@relaxed
@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["version: 1\n", "model: ", "{source: demo}", "\n", "quantize:\n", "  method: ", "rtn", "[", "]", "- ", "&a ", "*a", "!!x", "#", '"'])).map("".join)
)
def test_no_text_breaks_the_reader(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(RecipeError):
        load_recipe(path, ("quantize.scheme=w8a16",))


@relaxed
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_no_override_breaks_the_reader(tmp_path: Path, override: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("version: 1\nmodel: {source: demo}\nadapters: [{source: a}]\nquantize: {method: rtn, scheme: w8a16}\n")
    for name in ("", "model.source=", "adapters.", "run.threads="):
        with contextlib.suppress(RecipeError):
            load_recipe(path, (name + override,))
