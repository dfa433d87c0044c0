"""Number types from recipe to measured result: each runs, is close to the original, opens again with its scheme, and both engines agree on what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from flows import write_recipe
from safetensors.torch import load_file, save_file

import qforge
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.models.model import open_model
from qforge.scheme import parse

# (method, scheme; None: the method's own) -> largest KL divergence: about 1.5 times what it is
CASES = {
    ("rtn", "w8a8-int8"): 0.006,
    ("gptq", "w8a8-int8"): 0.006,
    ("rtn", "int8-channel-sym+int8-tensor-static"): 0.016,
    ("gptq", "fp8-e4m3-tensor+fp8-e4m3-tensor-static"): 0.08,
    ("fp8", None): 0.09,
    ("fp8", "fp8-e4m3-block32+fp8-e4m3-g32"): 0.09,
    ("nf4", None): 0.5,
    ("gptq", "nf4"): 0.25,
    ("rtn", "nvfp4"): 0.5,
    ("gptq", "nvfp4"): 0.25,
    ("rtn", "mxfp4"): 0.75,
}


@pytest.mark.parametrize(("method", "scheme"), CASES)
def test_a_number_type_runs_from_recipe_to_result(tmp_path: Path, method: str, scheme: str | None) -> None:
    tiny.make(tmp_path / "model", layers=2)
    quantize = {"method": method} if scheme is None else {"method": method, "scheme": scheme}
    results = qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[]), out=tmp_path / "out")
    expected = parse(scheme or {"fp8": "fp8-dynamic"}.get(method, method))
    assert results.evaluation is not None
    assert results.evaluation.kl_mean is not None
    assert 0 < results.evaluation.kl_mean < CASES[method, scheme]
    assert {layer.scheme for layer in results.layers} == {str(expected), None}  # the head is ignored
    artifact = open_model(str(tmp_path / "out"))
    assert set(artifact.schemes.values()) == {expected}
    window = list(range(3, 60))
    ours, theirs = (torch.cat(list(engine.score([window]))) for engine in (RuntimeEngine(artifact, threads=1), TransformersEngine(artifact)))
    # a value on the border of two activation codes may be rounded differently; from there on, logits differ by about as much as rounding changes them
    assert (ours - theirs).abs().median() < (1e-4 if expected.activations is None else 0.1)
    if expected.activations is not None and expected.activations.static:
        scales = [artifact.linear(name).input_scale for name in artifact.schemes]
        assert all(s is not None and s > 0 for s in scales)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_nvfp4_artifact_has_one_global_scale_in_what_vllm_fuses(tmp_path: Path, method: str) -> None:
    folder = tiny.make(tmp_path / "model", layers=2)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t * (7 if "k_proj" in n or "up_proj" in n else 1) for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    qforge.quantize(write_recipe(tmp_path, quantize={"method": method, "scheme": "nvfp4"}, export=[], evaluate=None), out=tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model" / "model.safetensors")
    for layer in range(2):
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = {float(stored[f"model.layers.{layer}.{name}.weight_global_scale"]) for name in fused}
            assert len(scales) == 1, (layer, fused, scales)
