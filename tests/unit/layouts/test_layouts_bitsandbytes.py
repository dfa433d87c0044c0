"""The bitsandbytes layout: its config, how it is read, what is refused, and damaged tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from qforge import numerics
from qforge.errors import ModelError
from qforge.export.hf import write_artifact
from qforge.layouts.bitsandbytes import BitsAndBytes, quantization_config, read_config
from qforge.methods import Options, find
from qforge.models.model import open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse

STATE = "weight.quant_state.bitsandbytes__nf4"


def rtn(weight: torch.Tensor, scheme: Scheme) -> QuantizedLinear:
    quantizer = find("rtn")
    assert quantizer is not None
    return quantizer.quantize(weight, scheme, None, Options())[0]


def packed(text: str = "nf4") -> dict[str, torch.Tensor]:
    return BitsAndBytes().pack(rtn(torch.randn(16, 128, generator=torch.Generator().manual_seed(0)), parse(text)))


@pytest.mark.parametrize("text", ["nf4", "nf4-g32@f32"])
def test_the_config_and_the_states_give_the_schemes_back(text: str) -> None:
    scheme = parse(text)
    config = quantization_config({"a": scheme, "b": scheme}, ["lm_head"], torch.bfloat16)
    assert config["bnb_4bit_use_double_quant"] == (text == "nf4")
    assert config["bnb_4bit_compute_dtype"] == "bfloat16"
    assert config["llm_int8_skip_modules"] == ["lm_head"]
    state = packed(text)[STATE]
    assert read_config(config, ["a", "b"], lambda name: state) == {"a": scheme, "b": scheme}
    for change in ({"load_in_4bit": False, "load_in_8bit": True}, {"bnb_4bit_quant_type": "fp4"}):
        with pytest.raises(ModelError, match="4-bit nf4"):
            read_config(config | change, ["a"], lambda name: state)


@pytest.mark.parametrize("text", ["int4-g64-sym", "nf4-channel@f32", "nf4-g48@f32", "nf4-g64", "nf4-g64@u8/g128:f32", "nf4-g64@f32+int8-token"])
def test_what_it_cannot_hold_is_refused(text: str) -> None:
    assert BitsAndBytes().supports(parse(text))


def changed(**changes: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda state: torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t[:8], "'weight' has shape"),
        ("weight", lambda t: t.float(), "float32"),
        ("weight.absmax", lambda t: t[:3], "weight.absmax"),
        ("weight.nested_absmax", lambda t: t * float("nan"), "finite"),
        ("weight.nested_absmax", lambda t: torch.ones(2), "nested_absmax"),
        ("weight.quant_map", lambda t: t * 2, "not the usual one"),
        ("weight.nested_quant_map", lambda t: t.flip(0), "not the usual one"),
        (STATE, lambda t: t[:10], "JSON"),
        (STATE, changed(quant_type="fp4"), "fp4"),
        (STATE, changed(blocksize=48), "48"),
        (STATE, changed(blocksize=32), "does not fit"),
        (STATE, changed(nested_blocksize=128), "128 scales"),
        (STATE, changed(shape=[16]), "shape"),
        (STATE, changed(shape=[1 << 40, 128]), "'weight' has shape"),
    ],
)
def test_damaged_tensors(name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    tensors = packed()
    with pytest.raises(ModelError, match=message):
        BitsAndBytes().unpack(tensors | {name: change(tensors[name])}, parse("nf4"))
    del tensors[name]
    with pytest.raises(ModelError, match="needs a tensor"):
        BitsAndBytes().unpack(tensors, parse("nf4"))


def test_an_artifact_with_nf4_opens_again(tmp_path: Path) -> None:
    source = open_model(str(tiny.make(tmp_path / "source", layers=2, tied=False, dtype=torch.bfloat16)))
    names = [n.removesuffix(".weight") for n in source.weights.names() if n.endswith("_proj.weight") and "layers.1.mlp" not in n]
    linears = {name: rtn(source.weights.read(f"{name}.weight").float(), parse("nf4")) for name in names}
    write_artifact(tmp_path / "model", source, dict.fromkeys(names, parse("nf4")), lambda name: linears[name], {})
    artifact = open_model(str(tmp_path / "model"))
    assert artifact.schemes == dict.fromkeys(names, parse("nf4"))
    assert all(artifact.linear(name).equals(q) for name, q in linears.items())
    assert torch.equal(artifact.weights.read(f"{names[0]}.weight"), numerics.dequantize(linears[names[0]]))
    assert set(artifact.weights.names()) == set(source.weights.names())
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["quantization_config"]["llm_int8_skip_modules"] == ["lm_head", *(f"model.layers.1.mlp.{n}_proj" for n in ("down", "gate", "up"))]
    tensors = load_file(tmp_path / "model/model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith(STATE)}, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="hold no weight"):
        open_model(str(tmp_path / "model"))
