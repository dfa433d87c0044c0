"""Exports for MLX, TensorRT-LLM, Ascend and Triton's server: read back by a second unpacking or by the program itself; one wrong bit is seen, what cannot be held is named."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import tiny
import torch
from quantized_models import quantized
from safetensors.torch import load_file, save_file

from qforge.engines import checkpoints
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.errors import ModelError, UnsupportedError
from qforge.export import exporter, verify_checkpoint
from qforge.export.agreement import next_token_logprobs
from qforge.export.triton_server import text_format
from qforge.export.verify import verify
from qforge.export.verify_packed import verify_packed
from qforge.export.verify_triton import verify_config
from qforge.models.model import open_model

SCHEMA = pytest.mark.skipif(importlib.util.find_spec("tritonclient") is None, reason="tritonclient is not installed")
MLX = pytest.mark.skipif(checkpoints.missing("mlx") is not None, reason="mlx-lm is not installed")
PACKED = [
    ("trtllm", "int4-g64-sym"), ("trtllm", "int8-channel-sym"), ("trtllm", "fp8-e4m3-channel+fp8-e4m3-token"), ("trtllm", "fp8-e4m3-block128+fp8-e4m3-g128"),
    ("ascend", "int4-g32-sym"), ("ascend", "int4-channel-sym"), ("ascend", "int8-channel-sym"), ("ascend", "int8-g64-sym"), ("ascend", "int8-channel-sym+int8-token"),
]  # fmt: skip


def opened(tmp_path, family="llama", **options):
    return open_model(str(tiny.make(tmp_path / f"source-{family}", family, **{"layers": 2, "hidden": 128, "dtype": torch.bfloat16, **options})))


def prompts(*lengths):
    return [torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


@pytest.mark.parametrize(("name", "text"), PACKED)
def test_what_nothing_here_runs_holds_our_weights(tmp_path, name, text):
    model = quantized(opened(tmp_path, "qwen2"), text)
    exporter(name).write(model, tmp_path / "out")
    (found,), left_out = verify_packed(name, tmp_path / "out", model)
    assert found.weights_equal, found.note
    assert not found.executed
    assert left_out[0].startswith("not executed:")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == model.config.rope_parameters["rope_theta"]
    file = next((tmp_path / "out").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] ^= 1 << 2
    save_file(tensors, file)
    (found,), _ = verify_packed(name, tmp_path / "out", model)
    assert found.weights_equal is False
    assert "layers.1.mlp.up_proj" in found.note
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, file)
    (found,), _ = verify_packed(name, tmp_path / "out", model)
    assert found.note == "unequal or missing: model.layers.1.mlp.up_proj, model.norm.weight"


def test_what_tensorrt_llm_is_told(tmp_path):
    model = quantized(opened(tmp_path), "int4-g64-sym")
    exporter("trtllm").write(model, tmp_path / "out")
    told = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
    assert told == {
        "quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], "group_size": 64, "has_zero_point": False, "pre_quant_scale": True,
    }  # fmt: skip


def test_what_ascend_is_told(tmp_path):
    model = quantized(opened(tmp_path), "int4-g32-sym", overrides={"down_proj": "int8-channel-sym+int8-token"}, ignore=("v_proj",))
    exporter("ascend").write(model, tmp_path / "out")
    told = json.loads((tmp_path / "out/quant_model_description.json").read_text())
    stored = {n for file in (tmp_path / "out").glob("*.safetensors") for n in load_file(file)}
    assert {k: told.pop(k) for k in ("version", "model_quant_type", "metadata", "group_size", "optional")} == {
        "version": "1.0.0", "model_quant_type": "W4A16", "metadata": {}, "group_size": 32, "optional": {},
    }  # fmt: skip
    assert set(told) == stored | {"lm_head.weight"}
    block = "model.layers.0."
    assert [told[block + n] for n in ("self_attn.q_proj.weight_scale", "mlp.down_proj.weight", "self_attn.v_proj.weight", "input_layernorm.weight")] == [
        "W4A16", "W8A8_DYNAMIC", "FLOAT", "FLOAT",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "options", "reason"),
    [
        ("trtllm", "int4-g32-sym", {}, "has no linear for int4-g32-sym"),
        ("trtllm", "int4-g64-sym", {"overrides": {"down_proj": "int8-channel-sym"}}, "one scheme for all"),
        ("trtllm", "int8-channel-sym", {"head": True}, "lm_head is quantized"),
        ("ascend", "int4-g32-asym", {}, "symmetric integers"),
        ("ascend", "int8-g32-sym", {"overrides": {"down_proj": "int4-g64-sym"}}, "one group size"),
        ("mlx", "int4-g48-sym", {}, "32, 64 or 128"),
        ("mlx", "int8-channel-sym+int8-token", {}, "activations are rounded"),
        ("triton", "nf4-g32@f32", {}, "nf4"),
    ],
)
def test_what_cannot_be_held_is_named(tmp_path, name, text, options, reason):
    model = quantized(opened(tmp_path, hidden=96 if "g48" in text else 128, intermediate=192 if "g48" in text else 128), text, **options)
    with pytest.raises(UnsupportedError, match=reason):
        exporter(name).write(model, tmp_path / "out")


@MLX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "text", "options"),
    [
        ("llama", "int4-g32-sym", {}),
        ("qwen2", "int4-g64-asym", {"overrides": {"down_proj": "int8-channel-sym"}}),
        ("qwen2", "int3-g32-asym", {"head": True}),
        ("llama", "int6-channel-sym", {}),
    ],
)
def test_mlx_runs_the_models_integers(tmp_path, family, text, options):
    model = quantized(opened(tmp_path, family, tied=family == "llama", rope_parameters={"rope_type": "default", "rope_theta": 7000.0}), text, **options)
    paths = exporter("mlx").write(model, tmp_path / "out")
    (found,), left_out = verify("mlx", paths, model, RuntimeEngine(model), prompts(5, 40))
    assert left_out == []
    assert found.executed
    assert found.weights_equal, found.note
    assert found.kl_mean < 1e-9
    name = next(iter(model.schemes))
    flipped = model.linear(name)
    flipped.codes[0, 0] ^= 1
    (found,), _ = verify("mlx", paths, replace(model, linears=lambda n: flipped if n == name else model.linear(n)), RuntimeEngine(model), prompts(5))
    assert found.weights_equal is False


def test_mlx_is_asked_for_as_much_as_it_computes_in_two_minutes(tmp_path, monkeypatch):
    """64 prompts of a model of 135M parameters would take its CPU build eleven minutes."""
    model = quantized(opened(tmp_path), "int4-g32-sym")
    paths, scorer, given = exporter("mlx").write(model, tmp_path / "out"), RuntimeEngine(model), prompts(*range(20, 30))
    parameters = sum(model.weights.read(name).numel() for name in model.weights.names())
    monkeypatch.setattr(verify_checkpoint, "_MLX_WEIGHTS", 60 * parameters)  # of 245 tokens: every fifth prompt
    monkeypatch.setattr(checkpoints, "run", lambda layout, folder, asked, *rest, **options: checkpoints.Executed("mlx-lm", "0", next_token_logprobs(scorer, asked), {}, {}))
    (found,), _ = verify("mlx", paths, model, scorer, given)
    assert found.positions == 2
    assert found.kl_mean < 1e-12


@SCHEMA
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym+int8-token"])
def test_a_triton_repository_is_read_by_its_schema_and_run(tmp_path, text):
    model = quantized(opened(tmp_path), text)
    paths = exporter("triton").write(model, tmp_path / "out")
    found, left_out = verify("triton", paths, model, RuntimeEngine(model), prompts(5, 16))
    assert any("Triton's server" in reason for reason in left_out)
    assert any(v.executed and v.engine == "onnxruntime" and v.kl_mean < 1e-2 for v in found)
    assert all(v.weights_equal for v in found if v.weights_equal is not None)
    assert "outputs as ONNX Runtime finds them" in found[-1].note
    path = tmp_path / "out/model/config.pbtxt"
    whole = path.read_text()
    path.write_text(whole.replace("TYPE_FP32", "TYPE_FP16", 1))
    with pytest.raises(ModelError, match="inputs and outputs"):
        verify_config(tmp_path / "out")
    path.write_text(whole.replace("max_batch_size", "max_batch"))
    with pytest.raises(ModelError, match="schema refuses"):
        verify_config(tmp_path / "out")


@SCHEMA
def test_a_triton_repository_for_vllm(tmp_path):
    model = quantized(opened(tmp_path))
    exporter("triton", "vllm").write(model, tmp_path / "out")
    assert verify_config(tmp_path / "out").note == "backend vllm"
    served = json.loads((tmp_path / "out/model/1/model.json").read_text())
    assert served == {"model": "/models/model/1/checkpoint", "gpu_memory_utilization": 0.9}  # arguments of vLLM 0.32's AsyncEngineArgs, which refuses what it does not know
    back = open_model(str(tmp_path / "out/model/1/checkpoint"))
    assert all(torch.equal(back.linear(n).codes, model.linear(n).codes) for n in model.schemes)


def test_a_quantized_head_is_not_written_for_vllm(tmp_path):
    model = quantized(opened(tmp_path), head=True)
    assert exporter("triton", "vllm").check(model) == (
        "the output head is quantized, and vLLM 0.32 does not load such a compressed-tensors checkpoint; leave it as it is (quantize.ignore: [lm_head])"
    )
    with pytest.raises(UnsupportedError, match="output head is quantized"):
        exporter("triton", "vllm").write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_text_format_quotes_and_nests():
    assert list(text_format({"name": 'a "b"', "dims": [1, -1], "input": [{"name": "x"}, {"name": "y"}]})) == [
        'name: "a \\"b\\""', "dims: [1, -1]", "input {", '  name: "x"', "}", "input {", '  name: "y"', "}",
    ]  # fmt: skip
