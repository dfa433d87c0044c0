"""Quantized checkpoints: codes come back as stored, weights dequantized by the reference, everything else untouched; mismatches are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from qforge import numerics
from qforge.errors import ModelError
from qforge.layouts.autogptq import AutoGptq
from qforge.layouts.checkpoint import layout_for
from qforge.layouts.compressed_tensors_config import quantization_config
from qforge.models.lora import with_adapters
from qforge.models.model import open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("quantized") / "base", "qwen2", layers=2, dtype=torch.bfloat16, tied=False)


def rtn(weight: torch.Tensor, scheme: Scheme) -> QuantizedLinear:
    """Some codes of a scheme that are near the weight; these tests need no more."""
    rows, columns = scheme.scale_shape(*weight.shape)
    grouped = weight.float().reshape(rows, columns, -1)
    low, high = scheme.code_range
    scales = numerics.round_scale(grouped.abs().amax(-1) / high * (1 if scheme.symmetric else 2), scheme.scale.type)
    zeros = None if scheme.symmetric else torch.full((rows, columns), (high + 1) // 2, dtype=torch.uint8)
    codes = torch.round(grouped / scales[..., None]) + (0 if zeros is None else zeros[..., None])
    return QuantizedLinear(scheme, codes.clamp(low, high).reshape(weight.shape).to(torch.int8 if scheme.symmetric else torch.uint8), scales, zeros)


def checkpoint(folder: Path, base: Path, pick: dict[str, str], pack: Any, config: dict[str, Any]) -> dict[str, QuantizedLinear]:
    """Write `base` with the linears whose names end in a key of `pick` quantized in its scheme."""
    shutil.copytree(base, folder)
    tensors, found = load_file(base / "model.safetensors"), {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        scheme = next((s for end, s in pick.items() if module.endswith(end) and name != module), None)
        if scheme is not None:
            found[module] = rtn(tensors.pop(name), parse(scheme))
            tensors |= {f"{module}.{local}": t for local, t in pack(found[module]).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config or compressed(found)}))
    return found


def compressed(found: dict[str, QuantizedLinear]) -> dict[str, Any]:
    schemes = {name: q.scheme for name, q in found.items()}
    return quantization_config(schemes, [f"model.layers.{i}.self_attn.o_proj" for i in range(2)] + ["lm_head"])


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("schemes", [("int4-g32-sym",), ("int4-g16-asym",), ("int8-channel-sym",), ("int4-g32-sym", "int8-channel-sym")])
def test_compressed_tensors(tmp_path: Path, base: Path, schemes: tuple[str, ...]) -> None:
    pick = {p: schemes[i % len(schemes)] for i, p in enumerate(PROJECTIONS)}
    layout = {s: parse(s) for s in schemes}
    want = checkpoint(tmp_path / "c", base, pick, lambda q: layout_for(q.scheme, layout, torch.bfloat16).pack(q), {})
    model = open_model(str(tmp_path / "c"))
    assert set(model.schemes) == set(want)
    assert not hasattr(model.config, "quantization_config")
    plain = open_model(str(base))
    assert set(model.weights.names()) == set(plain.weights.names())
    for name in model.weights.names():
        q = want.get(name.removesuffix(".weight"))
        expected = plain.weights.read(name) if q is None else numerics.dequantize(q)
        assert torch.equal(model.weights.read(name), expected), name
        assert model.weights.info(name).dtype == expected.dtype
        assert model.weights.info(name).shape == tuple(expected.shape)
    for name, q in want.items():
        got = model.linear(name)
        assert got.scheme == q.scheme
        assert torch.equal(got.codes, q.codes)
        assert torch.equal(got.scales, q.scales)
        assert (got.bias is not None) == name.endswith(("q_proj", "k_proj", "v_proj"))


@pytest.mark.parametrize(("version", "scheme", "sym"), [(1, "int4-g32-sym@f16", True), (2, "int4-g32-asym@f16", False), (1, "int8-channel-sym@f16", True)])
def test_gptq(tmp_path: Path, base: Path, version: int, scheme: str, sym: bool) -> None:
    group = 32 if "g32" in scheme else -1
    config = {"quant_method": "gptq", "bits": parse(scheme).bits, "group_size": group, "sym": sym, "desc_act": False, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
    want = checkpoint(tmp_path / "c", base, dict.fromkeys(PROJECTIONS, scheme), AutoGptq(version).pack, config)
    model = open_model(str(tmp_path / "c"))
    assert model.schemes == {name: q.scheme for name, q in want.items()}
    for name, q in want.items():
        assert torch.equal(model.linear(name).codes, q.codes)
        assert torch.equal(model.weights.read(f"{name}.weight"), numerics.dequantize(q))
    assert "model.layers.0.self_attn.o_proj.weight" in model.weights.names()


def test_another_dtype_leaves_dequantized_weights_in_fp32(tmp_path: Path, base: Path) -> None:
    want = checkpoint(tmp_path / "c", base, {"up_proj": "int4-g32-sym", "down_proj": "int4-g32-sym"}, layout_for(parse("int4-g32-sym"), {}, torch.bfloat16).pack, {})
    path = tmp_path / "c" / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["ignore"] += [f"model.layers.{i}.{m}" for i in range(2) for m in ("mlp.gate_proj", *(f"self_attn.{p}_proj" for p in "qkv"))]
    path.write_text(json.dumps(raw))
    model = open_model(str(tmp_path / "c"), dtype="float16")
    assert {model.weights.read(n).dtype for n in model.weights.names() if n.removesuffix(".weight") not in want} == {torch.float16}
    name = next(iter(want))
    assert model.weights.read(f"{name}.weight").dtype == torch.float32
    assert torch.equal(model.linear(name).codes, want[name].codes)
    assert with_adapters(model, []) is model


def test_mismatches_are_refused(tmp_path: Path, base: Path) -> None:
    pick = dict.fromkeys(PROJECTIONS, "int4-g32-sym")
    checkpoint(tmp_path / "c", base, pick, layout_for(parse("int4-g32-sym"), {}, torch.bfloat16).pack, {})
    path, weights = tmp_path / "c" / "config.json", tmp_path / "c" / "model.safetensors"
    good, tensors = json.loads(path.read_text()), load_file(weights)
    for change, message in (
        ({"ignore": ["lm_head"]}, "no weight_scale for them"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "keeps keys and values as {'num_bits': 8}, which qforge does not read"),
        ({"config_groups": {}}, "config_groups"),
    ):
        path.write_text(json.dumps(good | {"quantization_config": good["quantization_config"] | change}))
        with pytest.raises(ModelError, match=message):
            open_model(str(tmp_path / "c"))
    path.write_text(json.dumps(good))
    name = "model.layers.0.mlp.up_proj"
    save_file(tensors | {f"{name}.weight_scale": torch.ones(3, 3)}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"'{name}'.*weight_scale"):
        open_model(str(tmp_path / "c")).weights.read(f"{name}.weight")
    gptq = {"quant_method": "gptq", "bits": 5, "group_size": 32}
    path.write_text(json.dumps(good | {"quantization_config": gptq}))
    with pytest.raises(ModelError, match="5 bits"):
        open_model(str(tmp_path / "c"))
    path.write_text(json.dumps(good | {"quantization_config": gptq | {"bits": 4}}))
    with pytest.raises(ModelError, match="no qweight"):
        open_model(str(tmp_path / "c"))
