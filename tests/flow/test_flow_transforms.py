"""SmoothQuant and AWQ from recipe to result: better than without, loadable by transformers with equal logits, the same bytes after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from flows import kill_at, logits, with_outliers, write_recipe
from safetensors.torch import load_file, save_file

import qforge
from qforge.engines.transformers_engine import TransformersEngine
from qforge.files import sha256_tree
from qforge.models.model import open_model

STATIC = "int8-channel-sym+int8-tensor-static"


def kl(folder: Path, out: str, method: object, scheme: str) -> float:
    results = qforge.quantize(write_recipe(folder, quantize={"method": method, "scheme": scheme}, export=[]), out=folder / out)
    assert results.evaluation is not None
    assert results.evaluation.kl_mean is not None
    return results.evaluation.kl_mean


@pytest.mark.parametrize(
    ("method", "scheme", "plain", "gain"),
    [
        ("smoothquant", STATIC, "rtn", 0.1),
        ("awq", "int4-g32-sym", "rtn", 0.7),
        (["smoothquant", "gptq"], STATIC, "gptq", 0.1),
        ("rotate", STATIC, "rtn", 0.1),
        (["rotate", "smoothquant", "gptq"], STATIC, "gptq", 0.1),
    ],
)
def test_outlier_channels_lose_their_harm(tmp_path: Path, method: object, scheme: str, plain: str, gain: float) -> None:
    with_outliers(tiny.make(tmp_path / "model"))
    assert kl(tmp_path, "with", method, scheme) < gain * kl(tmp_path, "without", plain, scheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "method", "scheme"), [("llama", "smoothquant", STATIC), ("qwen2", ["awq", "gptq"], "int4-g32-sym"), ("gemma3_text", "awq", "int4-g32-asym")])
def test_the_artifact_loads_in_transformers_with_equal_logits(tmp_path: Path, family: str, method: object, scheme: str, dtype: torch.dtype) -> None:
    tiny.make(tmp_path / "model", family, dtype=dtype)
    exports = [{"format": "gptq"}] if family == "qwen2" else []
    results = qforge.quantize(write_recipe(tmp_path, quantize={"method": method, "scheme": scheme}, export=exports, evaluate=None), out=tmp_path / "out")
    windows = [list(range(3, 60))]
    artifact = open_model(str(tmp_path / "out"))
    torch.testing.assert_close(torch.cat(list(TransformersEngine(artifact).score(windows))), logits(tmp_path / "out" / "model", windows), atol=2e-4, rtol=2e-4)
    changed = json.loads((tmp_path / "out" / "model" / "qforge.json").read_text())["changed"]
    original = open_model(str(tmp_path / "model"))
    different = {n for n in original.weights.names() if n.removesuffix(".weight") not in artifact.schemes and not torch.equal(original.weights.read(n), artifact.weights.read(n))}
    assert different
    assert different <= set(changed)
    assert all("norm" in n or n.endswith(".bias") for n in changed)
    assert all(e.lossless for e in results.exports)
    for export in results.exports:
        again = open_model(str(tmp_path / "out" / str(export.path)))
        assert all(torch.equal(again.weights.read(n), artifact.weights.read(n)) for n in changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rotated_artifact_is_a_plain_model_for_others(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny.make(tmp_path / "model", dtype=dtype)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"] *= torch.linspace(0.5, 1.5, 64, dtype=dtype)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    quantize = {"method": ["rotate", "gptq"], "scheme": "int4-g32-sym"}
    results = qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[{"format": "gptq"}, {"format": "gguf", "type": "q4_0"}]), out=tmp_path / "out")
    windows = [list(range(3, 60))]
    artifact, original = open_model(str(tmp_path / "out")), open_model(str(tmp_path / "model"))
    torch.testing.assert_close(torch.cat(list(TransformersEngine(artifact).score(windows))), logits(tmp_path / "out" / "model", windows), atol=2e-4, rtol=2e-4)
    assert not artifact.config.tie_word_embeddings
    assert not torch.equal(artifact.weights.read("lm_head.weight"), artifact.weights.read("model.embed_tokens.weight"))
    assert any("unties" in w for w in results.warnings)
    assert results.model["parameters"] == sum(original.weights.read(n).numel() for n in original.weights.names())  # sizes are compared with the model that was given
    assert all(e.lossless for e in results.exports)
    assert results.evaluation is not None
    assert results.evaluation.reference is not None
    plain = qforge.quantize(write_recipe(tmp_path, quantize={"method": "none"}, export=[]), out=tmp_path / "plain").evaluation
    assert plain is not None
    assert results.evaluation.reference["perplexity"] == pytest.approx(plain.candidate["perplexity"], rel=1e-3)  # the reference is not rotated


def test_a_rotated_head_can_be_quantized_too(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    quantize = {"method": "rotate", "scheme": "w8a8-int8", "ignore": [], "overrides": [{"match": "lm_head", "scheme": "int8-channel-sym"}]}
    results = qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[]), out=tmp_path / "out")
    assert results.evaluation is not None
    assert results.evaluation.kl_mean is not None
    assert results.evaluation.kl_mean < 0.01
    assert str(open_model(str(tmp_path / "out")).schemes["lm_head"]) == "int8-channel-sym"


@pytest.mark.parametrize("transform", ["awq", "rotate"])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: str) -> None:
    tiny.make(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    path = write_recipe(tmp_path, quantize={"method": [transform, "gptq"], "scheme": "int4-g32-sym"}, export=[], evaluate=None)
    qforge.quantize(path, out=tmp_path / "whole")
    kill_at(2, path, tmp_path / "killed", monkeypatch)
    resumed = qforge.quantize(path, out=tmp_path / "killed")
    assert resumed.work["resumed"] >= 2
    assert sha256_tree(tmp_path / "killed" / "model") == sha256_tree(tmp_path / "whole" / "model")
