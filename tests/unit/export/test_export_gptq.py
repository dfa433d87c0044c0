"""GPTQ checkpoints: the artifact's integers by independent unpacking, what config.json says, and what the format cannot hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import tiny
import torch
from quantized_models import quantized
from safetensors.torch import load_file, save_file

from qforge.errors import UnsupportedError
from qforge.export.gptq import GptqExporter
from qforge.export.verify_checkpoint import verify_words
from qforge.files import sha256_tree
from qforge.models.model import open_model


@pytest.fixture
def source(tmp_path):
    return open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=torch.bfloat16)))


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g32-asym", "int8-channel-sym", "int8-g64-asym", "int2-g32-asym", "int3-g32-sym"])
def test_integers_equal_the_artifact(tmp_path, source, text):
    model = quantized(source, text)
    exporter = GptqExporter()
    assert exporter.check(model) is None
    paths = exporter.write(model, tmp_path / "out")
    assert {p.name for p in paths} >= {"config.json", "quantize_config.json", "model.safetensors", "tokenizer.json"}
    found = verify_words(tmp_path / "out", model)
    assert found.weights_equal, found.note


@pytest.mark.parametrize("name", ["mlp.up_proj.qweight", "mlp.up_proj.qzeros", "mlp.up_proj.scales", "mlp.up_proj.g_idx", "input_layernorm.weight"])
def test_verification_sees_one_wrong_bit(tmp_path, source, name):
    model = quantized(source)
    GptqExporter().write(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    tensors[f"model.layers.1.{name}"].reshape(-1).view(torch.uint8)[4] ^= 1 << 2
    save_file(tensors, tmp_path / "out/model.safetensors")
    found = verify_words(tmp_path / "out", model)
    assert found.weights_equal is False
    assert f"model.layers.1.{name.rpartition('.')[0]}" in found.note


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj"])
def test_verification_sees_what_is_lost(tmp_path, source, name):
    model = quantized(source)
    GptqExporter().write(model, tmp_path / "out")
    tensors = {n: t for n, t in load_file(tmp_path / "out/model.safetensors").items() if n != name and not n.startswith(f"{name}.")}
    save_file(tensors, tmp_path / "out/model.safetensors")
    found = verify_words(tmp_path / "out", model)
    assert found.weights_equal is False
    assert name in found.note


def test_settings(tmp_path, source):
    model = quantized(source, "int4-g32-sym", overrides={"down_proj": "int8-g64-sym"}, ignore=("v_proj",))
    GptqExporter().write(model, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    settings = config["quantization_config"]
    assert settings == json.loads((tmp_path / "out/quantize_config.json").read_text())
    assert (settings["bits"], settings["group_size"], settings["sym"], settings["checkpoint_format"], settings["desc_act"]) == (4, 32, True, "gptq", False)
    assert settings["dynamic"][r"+:^model\.layers\.0\.mlp\.down_proj$"] == {"bits": 8, "group_size": 64}
    assert settings["dynamic"][r"-:^model\.layers\.1\.self_attn\.v_proj$"] == {}
    assert len(settings["dynamic"]) == 4
    assert verify_words(tmp_path / "out", model).weights_equal
    assert "model.layers.0.self_attn.v_proj.weight" in load_file(tmp_path / "out/model.safetensors")
    again = open_model(str(tmp_path / "out"))
    assert all(torch.equal(again.linear(name).codes, model.linear(name).codes) for name in model.schemes)
    assert set(again.schemes) == set(model.schemes)


def test_activation_order_is_kept(tmp_path, source):
    model = quantized(source)

    def shuffled(name):
        q = model.linears(name)
        return replace(q, group_index=torch.randperm(q.in_features, generator=torch.Generator().manual_seed(0)).int() % q.scales.shape[1])

    ordered = replace(model, linears=shuffled)
    GptqExporter().write(ordered, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["desc_act"] is True
    assert verify_words(tmp_path / "out", ordered).weights_equal


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("int4-g32-sym", {"ignore": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}, "not quantized"),
        ("fp8-e4m3-channel", {}, "holds integers"),
        ("int8-channel-sym+int8-token", {}, "activations"),
        ("int4-g32-sym@f32", {}, "fp16"),
        ("int4-tensor-sym", {}, "per group or per channel"),
        ("int4-g32-sym", {"overrides": {"up_proj": "int4-g32-asym"}}, "as a whole"),
    ],
)
def test_what_the_format_cannot_hold(tmp_path, source, text, options, reason):
    model = quantized(source, text, **options)
    assert reason in GptqExporter().check(model)
    with pytest.raises(UnsupportedError, match=reason):
        GptqExporter().write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_models_give_equal_bytes(tmp_path, source):
    for out in ("a", "b"):
        GptqExporter().write(quantized(source), tmp_path / out)
    assert sha256_tree(tmp_path / "a") == sha256_tree(tmp_path / "b")


@pytest.mark.parametrize(
    ("overrides", "ignore", "expected"),
    [
        ({"q_proj": "int8-g64-sym", "k_proj": "int8-g64-sym", "v_proj": "int8-g64-sym"}, (), {"+:self_attn.qkv_proj": {"bits": 8, "group_size": 64}}),
        ({"gate_proj": "int8-g32-sym", "up_proj": "int8-g32-sym"}, (), {"+:mlp.gate_up_proj": {"bits": 8, "group_size": 32}}),
        ({}, ("q_proj", "k_proj", "v_proj", "down_proj"), {"-:self_attn.qkv_proj": {}}),
        ({"q_proj": "int8-g64-sym", "k_proj": "int8-g64-sym"}, (), {}),
        ({"gate_proj": "int8-g32-sym"}, ("up_proj",), {}),
    ],
)
def test_linears_that_vllm_joins_have_rules_under_the_joint_name(tmp_path, overrides, ignore, expected):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=torch.float16))), "int4-g32-sym", overrides=overrides, ignore=ignore)
    GptqExporter().write(model, tmp_path / "out")
    rules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"].get("dynamic", {})
    joint = {name: rule for name, rule in rules.items() if re.search(r"qkv_proj|gate_up_proj", name)}
    assert joint == {f"{name[:2]}^{re.escape(f'model.layers.{i}.{name[2:]}')}$": rule for i in range(2) for name, rule in expected.items()}
    assert {n: (s.bits, s.granularity) for n, s in open_model(str(tmp_path / "out")).schemes.items()} == {n: (s.bits, s.granularity) for n, s in model.schemes.items()}
