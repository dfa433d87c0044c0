"""Blame: damaged layers come first, in the order of their damage; settings are named where no weights are to blame."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import qforge
from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.divergence import evaluate
from qforge.models.model import Model, open_model
from qforge.search.blame import CACHE, OUTSIDE, blame, spread
from qforge.text.documents import from_texts
from qforge.text.windows import evaluation_windows

Tensors = dict[str, torch.Tensor]


def noisy(t: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(seed))
    return t + share * noise * t.norm() / noise.norm()


def damaged(folder: Path, change: Callable[[Tensors], None], **settings: object) -> tuple[Model, Model]:
    """A tiny model of five blocks, and a copy whose weights are all slightly off, as quantized ones are, and then changed."""
    whole, broken = tiny.make(folder / "whole", layers=5), tiny.make(folder / "broken", layers=5, **settings)
    tensors = load_file(broken / "model.safetensors")
    for i, name in enumerate(n for n in sorted(tensors) if "proj" in n):
        tensors[name] = noisy(tensors[name], 0.003, i)
    change(tensors)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return open_model(str(whole)), open_model(str(broken))


def windows(model: Model) -> list[list[int]]:
    return evaluation_windows(from_texts("t", [" ".join(tiny.TEXT) * 4]), model.tokenizer(), 48).ids


def three(t: Tensors) -> None:
    for name, share in (("4.mlp.down_proj", 0.15), ("1.mlp.down_proj", 0.3), ("3.mlp.down_proj", 0.07)):
        t[f"model.layers.{name}.weight"] = noisy(t[f"model.layers.{name}.weight"], share, 99)


def test_keys_and_values_in_fp8_are_a_part(tmp_path: Path) -> None:
    original = open_model(str(tiny.make(tmp_path / "model")))
    found = blame(original, replace(original, kv_scales={f"model.layers.{i}.self_attn": (0.02, 0.02) for i in range(3)}), windows(original), tokens=200)
    assert found.kl_mean > 0
    assert [(p.name, p.returned) for p in found.parts] == [(CACHE, pytest.approx(1, abs=1e-6))]
    assert f"{CACHE} (100%)" in found.words


def test_three_damaged_layers_come_first_in_order(tmp_path: Path) -> None:
    original, broken = damaged(tmp_path, three)
    found = blame(original, broken, windows(original), tokens=400)
    linears = [p.name for p in found.parts if p.part_of]
    assert linears[:3] == ["model.layers.1.mlp.down_proj", "model.layers.4.mlp.down_proj", "model.layers.3.mlp.down_proj"]
    blocks = [p.name for p in found.parts if not p.part_of]
    assert blocks[:3] == ["model.layers.1", "model.layers.4", "model.layers.3"]
    returned = {p.name: p.returned for p in found.parts}
    assert returned[linears[0]] > 0.3
    assert all(returned[n] < returned[linears[2]] for n in linears[3:])
    assert found.words.startswith(f"the divergence that goes when a part is restored: {linears[0]}")


def test_what_is_measured_is_what_a_restored_checkpoint_gives(tmp_path: Path) -> None:
    original, broken = damaged(tmp_path, three)
    ids = windows(original)
    found = {p.name: p.kl_mean for p in blame(original, broken, ids, tokens=10**6).parts}
    text = evaluation_windows(from_texts("t", [" ".join(tiny.TEXT) * 4]), original.tokenizer(), 48)
    for name in ("model.layers.1.mlp.down_proj", "model.layers.4"):
        tensors, whole = (load_file(tmp_path / n / "model.safetensors") for n in ("broken", "whole"))
        tensors |= {n: t for n, t in whole.items() if n.startswith(f"{name}.")}
        restored = tmp_path / name
        tiny.make(restored, layers=5)
        save_file(tensors, restored / "model.safetensors", metadata={"format": "pt"})
        got = evaluate(TransformersEngine(open_model(str(restored))), TransformersEngine(original), text).kl_mean
        assert found[name] == pytest.approx(got, rel=1e-4), name


def test_a_damaged_head_is_outside_of_the_blocks(tmp_path: Path) -> None:
    def change(t: Tensors) -> None:
        t["model.norm.weight"] = noisy(t["model.norm.weight"], 0.3, 5)

    original, broken = damaged(tmp_path, change)
    assert blame(original, broken, windows(original), tokens=200).parts[0].name == OUTSIDE


def test_settings_are_blamed_where_no_weights_are(tmp_path: Path) -> None:
    original, _ = damaged(tmp_path, lambda t: None)
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    found = blame(original, open_model(str(tmp_path / "broken")), windows(original), tokens=200)
    assert all(p.returned < 0.1 for p in found.parts)
    assert "no part's weights explain it; what differs in config.json: rope_parameters" in found.words


def test_equal_models_are_not_blamed(tmp_path: Path) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", layers=2)))
    found = blame(model, model, windows(model), tokens=50)
    assert (found.kl_mean, found.parts, found.words) == (0.0, [], "the models do not differ")


def test_windows_are_spread() -> None:
    ids = [[i] * 11 for i in range(10)]
    assert [w[0] for w in spread(ids, 25)] == [0, 3, 6]
    assert spread(ids, 10**6) == ids
    assert spread(ids, 1) == ids[:1]


def test_a_damaged_group_of_inputs_is_singled_out(tmp_path: Path) -> None:
    """An artifact of groups of 16 inputs, in whose worst linear the scales of one of four groups are off."""
    tiny.make(tmp_path / "model")
    recipe = {"version": 1, "model": {"source": "model"}, "quantize": {"method": "rtn", "scheme": "int8-g16-sym"}, "evaluate": None, "run": {"threads": 1}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    qforge.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out")
    file = next((tmp_path / "out" / "model").glob("*.safetensors"))
    tensors = load_file(file)
    scales = tensors["model.layers.1.mlp.up_proj.weight_scale"]
    scales[:, 2] *= 1.3
    save_file(tensors, file, metadata={"format": "pt"})
    original, broken = open_model(str(tmp_path / "model")), open_model(str(tmp_path / "out" / "model"))
    found = blame(original, broken, windows(original), tokens=300)
    assert scales.shape[1] == 4
    assert found.groups[0].name == "model.layers.1.mlp.up_proj, inputs 32 to 47"
    assert found.groups[0].returned > 0.9
    assert all(abs(g.returned) < 0.1 for g in found.groups[1:])
    assert "in model.layers.1.mlp.up_proj, the inputs 32 to 47 (" in found.words
    assert {g.part_of for g in found.groups} == {"model.layers.1.mlp.up_proj"}
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = broken.weights.read("model.layers.1.mlp.up_proj.weight").clone()
    tensors["model.layers.1.mlp.up_proj.weight"][:, 32:48] = original.weights.read("model.layers.1.mlp.up_proj.weight")[:, 32:48]
    tensors |= {n: broken.weights.read(n) for n in tensors if "proj" in n and "layers.1.mlp.up_proj" not in n}
    save_file(tensors, tiny.make(tmp_path / "mixed") / "model.safetensors", metadata={"format": "pt"})
    text = evaluation_windows(from_texts("t", [" ".join(tiny.TEXT) * 4]), original.tokenizer(), 48)
    chosen = replace(text, ids=spread(text.ids, 300), documents=[0] * len(spread(text.ids, 300)), bytes=None)
    assert found.groups[0].kl_mean == pytest.approx(evaluate(TransformersEngine(open_model(str(tmp_path / "mixed"))), TransformersEngine(original), chosen).kl_mean, rel=1e-3)
