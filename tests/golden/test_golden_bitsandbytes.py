"""NF4 as bitsandbytes 0.50 makes and reads it (make_bitsandbytes.py): its bytes mean to us what they mean to it, and its arithmetic is ours."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from make_bitsandbytes import GOLDEN, weight
from safetensors import safe_open

from qforge import numerics
from qforge.layouts.bitsandbytes import BitsAndBytes
from qforge.methods import Options, find
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, torch.Tensor], str]:
    with safe_open(GOLDEN, "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}, f.metadata()["dequantized_sha256"]  # noqa: SIM118  (a safetensors handle, not a dictionary)


def rtn(text: str) -> QuantizedLinear:
    quantizer = find("nf4")
    assert quantizer is not None
    return quantizer.quantize(weight(), parse(text), None, Options())[0]


def test_its_bytes_dequantize_to_its_own_values(golden: tuple[dict[str, torch.Tensor], str]) -> None:
    tensors, expected = golden
    q = BitsAndBytes().unpack(tensors, parse("nf4"))
    assert hashlib.sha256(numerics.dequantize(q).numpy().tobytes()).hexdigest() == expected
    packed = BitsAndBytes().pack(q)
    assert packed.keys() == tensors.keys()
    assert json.loads(bytes(packed.pop(STATE).tolist())) == json.loads(bytes(tensors[STATE].tolist()))
    assert all(torch.equal(packed[name], tensors[name]) for name in packed)


def test_double_quantization_is_the_same(golden: tuple[dict[str, torch.Tensor], str]) -> None:
    tensors, _ = golden
    packed = BitsAndBytes().pack(rtn("nf4"))
    assert all(torch.equal(packed[name], tensors[name]) for name in packed if "absmax" in name or "map" in name)
    assert json.loads(bytes(packed[STATE].tolist())) == json.loads(bytes(tensors[STATE].tolist()))


def test_codes_are_the_same_for_unrounded_scales_and_nearer_for_those_that_are_stored(golden: tuple[dict[str, torch.Tensor], str]) -> None:
    """bitsandbytes chooses codes before it rounds the scales; we choose them for the scales that will be there."""
    tensors, _ = golden
    assert torch.equal(BitsAndBytes().pack(rtn("nf4-g64@f32"))["weight"], tensors["weight"])
    theirs, ours = BitsAndBytes().unpack(tensors, parse("nf4")), rtn("nf4")
    errors = [(numerics.dequantize(q) - weight()).abs() for q in (ours, theirs)]
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    assert errors[0].sum() < errors[1].sum()
