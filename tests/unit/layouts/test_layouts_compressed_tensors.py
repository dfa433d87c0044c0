"""The compressed-tensors layout: its config, other people's configs, and damaged tensors."""

from __future__ import annotations

import pytest
import torch

from qforge import numerics
from qforge.errors import ModelError
from qforge.layouts.compressed_tensors import CompressedTensors, scale_dtype_for
from qforge.layouts.compressed_tensors_config import quantization_config, read_config
from qforge.scheme import parse

NAMES = [f"model.layers.{i}.{m}" for i in range(2) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")] + ["lm_head"]


@pytest.mark.parametrize(
    "texts",
    [
        ("int4-g32-sym",),
        ("int4-g64-asym",),
        ("int8-channel-sym+int8-token", "int4-g32-sym"),
        ("fp8-e4m3-block32+fp8-e4m3-g32",),
        ("int4-g32-sym@f32", "int8-tensor-sym", "int4-g16-asym"),
    ],
)
def test_config_round_trip(texts):
    schemes = {name: parse(texts[i % len(texts)]) for i, name in enumerate(NAMES[:5])}
    config = quantization_config(schemes, NAMES[5:])
    assert read_config(config, NAMES) == schemes


def test_config_is_read_as_compressed_tensors_reads_it():
    from compressed_tensors.quantization import QuantizationConfig

    schemes = {name: parse("int8-g64-sym" if "down" in name else "int4-g32-asym") for name in NAMES[:-1]}
    config = quantization_config(schemes, ["lm_head"])
    theirs = QuantizationConfig.model_validate(config)
    assert [g.weights.num_bits for g in theirs.config_groups.values()] == [8, 4]
    assert theirs.config_groups["group_1"].targets == ["Linear"]
    assert "dequantize" not in config
    assert quantization_config(dict.fromkeys(NAMES, parse("int4-g32-asym")), [])["dequantize"] is True


def test_configs_by_others():
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": "group", "observer": "minmax"}
    config = {
        "config_groups": {"group_0": {"targets": ["re:.*self_attn.*"], "weights": weights}, "g": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        "ignore": ["lm_head", "re:.*layers\\.1.*"],
    }
    found = read_config(config, NAMES)
    assert found == {NAMES[0]: parse("int4-g128-sym"), NAMES[1]: parse("int8-tensor-sym"), NAMES[2]: parse("int8-tensor-sym")}
    preset = read_config({"config_groups": {"W8A8": ["Linear"]}, "ignore": ["lm_head"]}, NAMES)
    assert set(preset.values()) == {parse("int8-channel-sym+int8-token")}
    assert "lm_head" not in preset


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config_groups"),
        ({"config_groups": {"a": 3}}, "targets"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 7}}}}, "7 bits"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "group", "group_size": -3}}}}, "group_size -3"),
        ({"config_groups": {"a": {"targets": ["re:("], "weights": {}}}}, "regular expression"),
        ({"config_groups": {"unheard_of": ["Linear"]}}, "preset"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}, "input_activations": {"symmetric": False}}}}, "zero point"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": [4]}}}}, "bits"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": [1]}}}, "weights"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}, "input_activations": 1}}}, "input_activations"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": {}}}, "ignore": 3}, "ignore"),
    ],
)
def test_malformed_configs(config, message):
    with pytest.raises(ModelError, match=message):
        read_config(config, NAMES)


def packed(text="int4-g32-asym"):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    scheme = parse(text)
    return CompressedTensors().pack(numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))), scheme


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_packed", lambda t: None, "weight"),
        ("weight_packed", lambda t: t[:8], "weight_packed"),
        ("weight_packed", lambda t: t.float(), "int32"),
        ("weight_shape", lambda t: torch.tensor([16, 1 << 40]), "weight_packed"),
        ("weight_shape", lambda t: torch.tensor([-1, 64]), "positive"),
        ("weight_shape", lambda t: torch.tensor([16]), "weight_shape"),
        ("weight_shape", lambda t: t[None], "weight_shape"),
        ("weight_scale", lambda t: t.flatten(), "weight_scale"),
        ("weight_scale", lambda t: t.view(8, 2, 2), "weight_scale"),
        ("weight_scale", lambda t: t[:, :1], "weight_scale"),
        ("weight_scale", lambda t: t * float("nan"), "finite"),
        ("weight_zero_point", lambda t: None, "weight_zero_point"),
        ("weight_zero_point", lambda t: t[:1], "weight_zero_point"),
        ("weight_zero_point", lambda t: torch.tensor(3, dtype=torch.int32), "weight_zero_point"),
        ("weight_zero_point", lambda t: t.new_zeros(16), "weight_zero_point"),
        ("weight_zero_point", lambda t: t.new_zeros(16, 1), "weight_zero_point"),
        ("weight_zero_point", lambda t: torch.zeros(16, 2), "integers"),
        ("weight_zero_point", lambda t: torch.full((16, 2), 300, dtype=torch.int64), "int4-g32-asym cannot"),
        ("weight_g_idx", lambda t: torch.full((64,), 9), "group"),
    ],
)
def test_damaged_tensors(name, change, message):
    tensors, scheme = packed()
    changed = change(tensors.pop(name, torch.zeros(1)))
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(ModelError, match=message):
        CompressedTensors().unpack(tensors, scheme)


def test_scale_dtypes_are_exact_after_loading():
    assert scale_dtype_for(parse("int4-g32-sym"), torch.bfloat16) is torch.bfloat16
    assert scale_dtype_for(parse("int4-g32-asym"), torch.bfloat16) is torch.float32
    assert scale_dtype_for(parse("int4-g32-sym@bf16"), torch.float16) is torch.float32
    assert scale_dtype_for(parse("int4-g32-sym"), torch.float32) is torch.float32


def test_group_index_of_older_checkpoints_is_read():
    tensors, scheme = packed("int4-g32-sym")
    index = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 32
    q = CompressedTensors().unpack(tensors | {"weight_g_idx": index}, scheme)
    assert q.group_index is not None
    assert torch.equal(q.group_index, index.int())
