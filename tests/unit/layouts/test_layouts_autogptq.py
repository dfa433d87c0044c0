"""GPTQ checkpoints: their settings, by module too, and damaged tensors."""

from __future__ import annotations

import pytest
import torch

from qforge import numerics
from qforge.errors import ModelError, UnsupportedError
from qforge.layouts.autogptq import AutoGptq, read_config
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def test_settings_by_module():
    config = {"bits": 4, "group_size": 128, "sym": True, "dynamic": {r"-:.*lm_head": {}, r"+:.*down_proj$": {"bits": 8, "group_size": -1}, r".*q_proj": {"sym": False}}}
    found = read_config(config, ["a.down_proj", "a.q_proj", "a.up_proj"])
    assert [str(s) for s in found.values()] == ["int8-channel-sym@f16", "int4-g128-asym@f16", "int4-g128-sym@f16"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "None bits"),
        ({"bits": [4]}, "not readable"),
        ({"bits": 5, "group_size": 128}, "5 bits"),
        ({"bits": 4, "group_size": 0}, "groups of 0"),
        ({"bits": 4, "dynamic": [1]}, "dynamic"),
        ({"bits": 4, "dynamic": {"(": {}}}, "regular expression"),
    ],
)
def test_malformed_settings(config, message):
    with pytest.raises(ModelError, match=message):
        read_config(config, ["a"])


def packed(text="int4-g32-asym"):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    scheme = parse(text)
    return AutoGptq(2).pack(numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))), scheme


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: None, "qweight"),
        ("qweight", lambda t: t[:3], "qweight"),
        ("qzeros", lambda t: t[:1], "qzeros"),
        ("scales", lambda t: t[:1], "scales"),
        ("scales", lambda t: t / 0, "finite"),
        ("g_idx", lambda t: t + 5, "group"),
        ("g_idx", lambda t: t[:, None], "shape"),
        ("g_idx", lambda t: t.view(-1, 2), "shape"),
        ("g_idx", lambda t: t[:-8], "qweight|scales"),
    ],
)
def test_damaged_tensors(name, change, message):
    tensors, scheme = packed()
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    with pytest.raises(ModelError, match=message):
        AutoGptq(2).unpack(tensors, scheme)


def test_a_symmetric_checkpoint_with_other_zero_points_is_refused():
    tensors, _ = packed()
    with pytest.raises(ModelError, match="sym: false"):
        AutoGptq(2).unpack(tensors, parse("int4-g32-sym"))


def test_version_1_has_no_zero_point_zero():
    q = QuantizedLinear(parse("int4-g32-asym"), torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="version 2"):
        AutoGptq(1).pack(q)
    assert AutoGptq(2).unpack(AutoGptq(2).pack(q), q.scheme).equals(q)


def test_scales_that_fp16_rounds_are_refused():
    q = QuantizedLinear(parse("int4-g32-sym"), torch.zeros(8, 32, dtype=torch.int8), torch.full((8, 1), 0.1))
    with pytest.raises(UnsupportedError, match="fp16"):
        AutoGptq(1).pack(q)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_stored_zero_point_that_version_1_would_add_one_to_beyond_its_bits_is_refused(bits: int) -> None:
    scheme = parse(f"int{bits}-g32-asym")
    q = QuantizedLinear(scheme, torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1), torch.ones(32, 1, dtype=torch.uint8))
    tensors = AutoGptq(1).pack(q)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    with pytest.raises(ModelError, match=f"zero point of {1 << bits}, which means 0 to some"):
        AutoGptq(1).unpack(tensors, scheme)
    assert AutoGptq(2).unpack(tensors, scheme).zeros.unique().tolist() == [(1 << bits) - 1]
