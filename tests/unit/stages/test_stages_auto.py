"""What `method: auto` may choose from, and how it keeps a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from qforge.errors import QforgeError, RecipeError, UnsupportedError
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.recipe import Recipe, load_recipe
from qforge.scheme import parse
from qforge.stages.candidates import Candidates, candidates

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def recipe(folder: Path, quantize: dict[str, object], **changes: object) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"version": 1, "model": {"source": "model"}, "quantize": {"method": "auto", "budget": "4.5 bits", **quantize}, "evaluate": None, **changes}))
    return load_recipe(path)


def found(folder: Path, quantize: dict[str, object], **changes: object) -> Candidates:
    if not (folder / "model").exists():
        tiny.make(folder / "model", hidden=96, intermediate=192, heads=3, kv_heads=3)
    model = open_model(str(folder / "model"))
    result = candidates(recipe(folder, quantize, **changes), model, BlockModel(model))
    assert result is not None
    return result


def texts(folder: Path, name: str, quantize: dict[str, object], **changes: object) -> list[str]:
    return [str(s) for s in found(folder, quantize, **changes).options(name)]


def test_group_sizes_are_fitted_to_each_width(tmp_path: Path) -> None:
    assert texts(tmp_path, Q, {}) == ["int2-g96-sym", "int3-g96-sym", "int4-g96-sym", "int4-g32-sym", "int5-g96-sym", "int6-g96-sym", "int8-channel-sym"]
    assert "int4-g64-sym" in texts(tmp_path, DOWN, {"candidates": ["int4-g64-sym", "int4-g32-sym"]})
    assert texts(tmp_path, Q, {"candidates": ["int4-g64-sym", "int4-g32-sym"]}) == ["int4-g32-sym"]
    assert texts(tmp_path, Q, {"candidates": ["int4-g64-sym"], "options": {"group_fallback": "adjust"}}) == ["int4-g32-sym"]


def test_an_export_drops_what_it_cannot_hold(tmp_path: Path) -> None:
    held = found(tmp_path, {}, export=[{"format": "gptq"}])
    assert [str(s) for s in held.options(Q)] == ["int2-g96-sym", "int3-g96-sym", "int4-g96-sym", "int4-g32-sym", "int8-channel-sym"]
    assert [n.split(" is no candidate")[0] for n in held.notes] == ["int5-g128-sym", "int6-g128-sym"]
    assert texts(tmp_path, Q, {}, export=[{"format": "gguf", "type": "q4_0"}]) == ["int2-g96-sym", "int3-g96-sym", "int4-g96-sym", "int4-g32-sym"]
    assert found(tmp_path, {}, export=[{"format": "mlx", "optional": True}]).notes == ()
    assert "32 bits each" in found(tmp_path, {"candidates": ["int4-g32-asym", "int4-g32-sym"]}).notes[0]


@pytest.mark.parametrize(
    ("quantize", "export", "error", "says"),
    [
        ({"candidates": ["int5-g32-sym", "int4-g32-sym"]}, [{"format": "gptq"}], UnsupportedError, r"int5-g32-sym: export gptq cannot hold it: .*2, 3, 4, 8 bits"),
        ({"candidates": ["int4-g32-asym", "int4-g32-sym"]}, [{"format": "gptq"}], UnsupportedError, "symmetric or asymmetric as a whole"),
        ({"candidates": ["int8-channel-sym+int8-token"]}, [], UnsupportedError, "rounds activations"),
        ({"candidates": ["nf4", "int4-g32-sym"]}, [], UnsupportedError, "nf4"),
        ({"candidates": ["int4-g32-offset"]}, [], UnsupportedError, "no offsets"),
        ({"candidates": ["int4-g128-sym", "int4-g32-sym"]}, [], RecipeError, "int4-g128-sym: .*128 does not divide.*group_fallback: adjust"),
        ({"candidates": ["int4-g64-sym"]}, [], RecipeError, "none fits .*q_proj"),
        ({"ignore": ["*"]}, [], RecipeError, "nothing is left to choose"),
        ({"budget": "2 bits"}, [], RecipeError, r"smallest candidates take 2\.1\d+ bits"),
        ({"budget": "1 kB"}, [], RecipeError, r"smallest candidates take .* MB"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(tmp_path: Path, quantize: dict[str, object], export: list[object], error: type[QforgeError], says: str) -> None:
    with pytest.raises(error, match=says):
        found(tmp_path, quantize, export=export)


def test_overrides_and_ignore_win(tmp_path: Path) -> None:
    full = {"match": "model.layers.2.mlp.up_proj", "scheme": "int8-g32-asym"}
    c = found(tmp_path, {"ignore": ["lm_head", "*.2.*"], "overrides": [{"match": "*.down_proj", "scheme": "int8-g32-asym"}, full]})
    assert c.options(DOWN) == (parse("int8-g32-asym"),)
    assert "model.layers.2.self_attn.q_proj" not in c.shapes
    assert "model.layers.2.mlp.down_proj" not in c.shapes
    assert str(c.draft()["model.layers.2.mlp.up_proj"]) == "int8-g32-asym"
    assert c.capacity_bits == int(4.5 * c.weights)
