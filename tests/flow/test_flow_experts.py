"""Mixtures of experts from recipe to result: better than rounding, loadable by transformers with equal logits, exported, and the same bytes after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from flows import kill_at, logits, write_recipe
from safetensors.torch import load_file, save_file

import qforge
from qforge import LLM, pipeline
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import UnsupportedError
from qforge.export import exporter
from qforge.files import sha256_tree
from qforge.models.model import open_model

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
WINDOW = list(range(3, 60))


def make(folder: Path, family: str, **settings: Any) -> Path:
    return tiny.make(folder, family, **{"layers": 2, **FAMILIES[family], **settings})


def scores(model: Path) -> torch.Tensor:
    return torch.cat(list(TransformersEngine(open_model(str(model), dtype="float32")).score([WINDOW])))


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_is_better_than_rounding_and_transformers_runs_the_artifact(tmp_path: Path, family: str) -> None:
    make(tmp_path / "model", family)
    found = {}
    for method in ("rtn", "gptq"):
        results = qforge.quantize(write_recipe(tmp_path, quantize={"method": method, "scheme": "int4-g32-sym"}, export=[]), out=tmp_path / method)
        assert results.evaluation is not None
        assert results.evaluation.engine.startswith("transformers" if family == "qwen2_moe" else "qforge")
        found[method] = results.evaluation.kl_mean or 0.0
        artifact = open_model(str(tmp_path / method))
        routers = {layer.name: layer for layer in results.layers if layer.note is not None and "decides over experts" in layer.note}
        assert all(layer.scheme is None for layer in routers.values())
        assert len(routers) == (4 if family == "qwen2_moe" else 2)
        assert len([n for n in artifact.schemes if ".experts." in n]) == 2 * 3 * len({n.split(".")[5] for n in artifact.schemes if ".experts." in n})
        assert set(json.loads((tmp_path / method / "model" / "config.json").read_text())["quantization_config"]["ignore"]) == {*routers, "lm_head"}
        torch.testing.assert_close(scores(tmp_path / method), logits(tmp_path / method / "model", [WINDOW]), atol=2e-4, rtol=2e-4)
    assert 0 < found["gptq"] < found["rtn"]


@pytest.mark.parametrize(
    ("scheme", "overrides"),
    [("int4-g32-sym", {"*self_attn*": "int8-g32-sym"}), ("int4-g32-sym", {"*.experts.*": "int8-channel-sym"}), ("fp8-e4m3-channel", {}), ("int3-g32-sym", {})],
)
def test_transformers_reads_the_experts_scheme_among_others(tmp_path: Path, scheme: str, overrides: dict[str, str]) -> None:
    make(tmp_path / "model", "qwen3_moe")
    quantize = {"method": "rtn", "scheme": scheme, "overrides": [{"match": m, "scheme": s} for m, s in overrides.items()]}
    results = qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[], evaluate=None), out=tmp_path / "out")
    assert not any("transformers" in w for w in results.warnings)
    torch.testing.assert_close(scores(tmp_path / "out"), logits(tmp_path / "out" / "model", [WINDOW]), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("quantize", "says"),
    [
        ({"scheme": "int4-g32-asym"}, "does not read int4-g32-asym experts"),
        ({"scheme": "w8a8-int8"}, "does not read .* experts: integers without rounded activations"),
        ({"scheme": "fp8-dynamic"}, "does not round the inputs of experts"),
        ({"scheme": "int4-g32-sym", "ignore": ["lm_head", "*.experts.*"]}, "does not load unquantized experts"),
        ({"scheme": "int4-g32-sym", "overrides": [{"match": "*.experts.1.*", "scheme": "int8-g32-sym"}]}, "one scheme"),
    ],
)
def test_what_transformers_does_not_run_is_said_and_runs_here(tmp_path: Path, quantize: dict[str, Any], says: str) -> None:
    make(tmp_path / "model", "qwen3_moe")
    results = qforge.quantize(write_recipe(tmp_path, quantize={"method": "rtn", **quantize}, export=[]), out=tmp_path / "out")
    assert any(says.split(" ")[0] in w and "transformers 5.23" in w for w in results.warnings)
    assert results.evaluation is not None
    assert results.evaluation.kl_mean is not None
    assert results.evaluation.kl_mean < 1
    runtime = torch.cat(list(LLM(str(tmp_path / "out")).score([WINDOW])))
    rounds = any(s.activations is not None for s in open_model(str(tmp_path / "out")).schemes.values())
    assert (runtime - scores(tmp_path / "out")).norm() / runtime.norm() < (2e-2 if rounds else 1e-4)


def test_the_runtime_computes_experts_of_any_order_and_of_several_schemes(tmp_path: Path) -> None:
    """Act-order gathers an expert's inputs; experts of other schemes than their neighbours are products of their own."""
    make(tmp_path / "model", "mixtral", hidden=96, intermediate=192)
    overrides = [{"match": "*.experts.1.*", "scheme": "int8-channel-sym"}, {"match": "*.experts.2.w1", "scheme": "int4-g32-sym"}]
    quantize = {"method": "gptq", "scheme": "int4-g32-asym", "overrides": overrides, "options": {"act_order": True}}
    qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[], evaluate=None), out=tmp_path / "out")
    runtime = torch.cat(list(LLM(str(tmp_path / "out")).score([WINDOW])))
    torch.testing.assert_close(runtime, scores(tmp_path / "out"), atol=2e-4, rtol=2e-4)
    with pytest.raises(UnsupportedError, match="GGUF keeps the experts of a layer in one tensor"):
        exporter("gguf", "auto").write(open_model(str(tmp_path / "out")), tmp_path / "gguf")


def test_a_plan_knows_experts_and_leaves_routers_alone(tmp_path: Path) -> None:
    make(tmp_path / "model", "qwen2_moe")
    overrides = [{"match": "*gate*", "scheme": "int8-g32-sym"}]  # gate_proj, and both kinds of router
    path = write_recipe(tmp_path, quantize={"method": "rtn", "scheme": "int4-g32-sym", "overrides": overrides}, export=[], evaluate=None)
    _, plan, estimate = pipeline.plan(path)
    results = qforge.quantize(path, out=tmp_path / "out")
    assert plan.size_bytes == pytest.approx(results.artifact["weights_bytes"], rel=0.15)
    assert sum(p.scheme is not None for p in plan.layers) == len(open_model(str(tmp_path / "out")).schemes) == 2 * (4 + 3 + 4 * 3)
    assert {p.name.rpartition(".")[2] for p in plan.layers if p.scheme is None} == {"gate", "shared_expert_gate", "lm_head"}
    assert any("one scheme" in note for note in plan.notes)
    assert all(seconds > 0 for name, seconds in estimate.seconds.items() if name == "quantize")


def test_exports_hold_experts_or_say_why_not(tmp_path: Path) -> None:
    make(tmp_path / "model", "mixtral")
    path = write_recipe(tmp_path, quantize={"method": "rtn", "scheme": "int4-g32-sym"}, export=[{"format": "gptq"}, {"format": "gguf"}], evaluate=None)
    exports = qforge.quantize(path, out=tmp_path / "out").exports
    assert all(export.lossless for export in exports)
    for export in exports:
        model = next((tmp_path / "out" / str(export.path)).glob("*.gguf"), tmp_path / "out" / str(export.path))
        torch.testing.assert_close(scores(model), scores(tmp_path / "out"))
    with pytest.raises(UnsupportedError, match="it is a mixture of experts"):
        qforge.quantize(write_recipe(tmp_path, export=[{"format": "onnx"}], evaluate=None), out=tmp_path / "other")
    make(tmp_path / "model", "qwen2_moe")
    with pytest.raises(UnsupportedError, match=r"a 'qwen2_moe' model .* has no GGUF form"):
        qforge.quantize(write_recipe(tmp_path, export=[{"format": "gguf"}], evaluate=None), out=tmp_path / "other")


def test_starved_experts_are_named_with_advice(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen3_moe", num_experts=16)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name][3:] *= 0.05  # the first three experts take most tokens
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = write_recipe(tmp_path, calibration={"source": "calibration.txt", "samples": 4, "sequence_length": 32}, export=[])
    results = qforge.quantize(path, out=tmp_path / "out")
    (sentence,) = (w for w in results.warnings if "fewer calibration tokens than they have inputs" in w)
    assert ".mlp.experts." in sentence
    assert "calibration.samples" in sentence
    tokens = {layer.name: layer.tokens for layer in results.layers if ".experts." in layer.name}
    unreached = [n for n, t in tokens.items() if t == 0]
    assert unreached
    assert f"{len({n.rpartition('.')[0] for n in unreached})} of them none" in sentence
    assert any("never reached this layer" in w and unreached[0] in w for w in results.warnings)
    assert all(torch.isfinite(open_model(str(tmp_path / "out")).weights.read(f"{n}.weight")).all() for n in tokens)


@pytest.mark.parametrize("method", ["gptq", ["awq", "gptq"]])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: object) -> None:
    make(tmp_path / "model", "mixtral", dtype=torch.bfloat16)
    path = write_recipe(tmp_path, quantize={"method": method, "scheme": "int4-g32-sym"}, export=[], evaluate=None)
    qforge.quantize(path, out=tmp_path / "whole")
    kill_at(1, path, tmp_path / "killed", monkeypatch)
    assert qforge.quantize(path, out=tmp_path / "killed").work["resumed"] >= 1
    assert sha256_tree(tmp_path / "killed" / "model") == sha256_tree(tmp_path / "whole" / "model")
