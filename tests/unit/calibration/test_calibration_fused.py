"""Linears that engines fuse have one scale in common, where a scheme has one for all of a weight: vLLM keeps one of them, and what the others' codes stand for would change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, run, schemes_of, windows
from torch import nn

from qforge import numerics
from qforge.calibration.linear import reaches
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.errors import NumericalError
from qforge.methods import Options, find, find_transforms
from qforge.models.blocks import BlockModel
from qforge.models.model import Model, open_model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

FAMILIES = {"llama": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}}
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
SCHEMES = ["nvfp4", "fp8-e4m3-tensor", "fp8-e4m3-tensor+fp8-e4m3-tensor-static"]


def model(folder: Path, family: str) -> Model:
    """Ranges of what is fused differ by more than a factor of two."""
    opened = open_model(str(tiny.make(folder, family, layers=2, **FAMILIES[family])))
    read = opened.weights.read

    def spread(name: str) -> torch.Tensor:
        return read(name) * next((f for part, f in (("q_proj", 5.0), ("v_proj", 0.1), ("up_proj", 3.0)) if part in name), 1.0)

    opened.weights.read = spread  # type: ignore[method-assign]
    return opened


def quantized(opened: Model, method: str, scheme: str) -> Memory:
    blocks, quantizer, memory = BlockModel(opened), find(method.split()), Memory()
    assert quantizer is not None
    schemes = {n: s for n, s in schemes_of(blocks, scheme).items() if n not in blocks.routers}
    options = replace(Options(), error_correction=parse(scheme).activations is None)
    needed = method != "rtn" or parse(scheme).activations is not None
    quantize_blocks(Job(blocks, quantizer, schemes, options, transforms=find_transforms(method.split())), windows() if needed else None, memory.store(), SILENT)
    return memory


def common(q: QuantizedLinear) -> float:
    return float(q.scales if q.super_scales is None else q.super_scales)


def assert_equal_within_groups(linears: dict[str, QuantizedLinear]) -> None:
    groups: dict[tuple[str, int], set[float]] = {}
    for name, q in linears.items():
        parent, _, kind = name.rpartition(".")
        place = next((i for i, kinds in enumerate(FUSED) if kind in kinds), None)
        if place is not None:
            groups.setdefault((parent, place), set()).add(common(q))
    assert len(groups) >= 4
    assert all(len(values) == 1 for values in groups.values()), groups


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq gptq"])
def test_fused_linears_have_one_common_scale_and_are_as_near_to_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, scheme: str, method: str) -> None:
    opened = model(tmp_path / "m", family)
    together = quantized(opened, method, scheme)
    assert_equal_within_groups(together.linears())
    monkeypatch.setattr("qforge.calibration.sequential.reaches", lambda *args, **named: {})
    alone = quantized(opened, method, scheme)
    with pytest.raises(AssertionError):
        assert_equal_within_groups(alone.linears())
    for a, b in zip(together.pieces[0].layers, alone.pieces[0].layers, strict=True):
        assert a.relative_error is not None
        assert b.relative_error is not None
        assert a.relative_error < 1.1 * b.relative_error, a.name
    if method == "rtn" and scheme == "nvfp4":  # a power of two: the same weights, whatever the common scale is
        for name, q in together.linears().items():
            assert torch.equal(numerics.dequantize(q), numerics.dequantize(alone.linears()[name]))


@pytest.mark.parametrize("method", ["gptq", "awq gptq"])
def test_workers_give_the_same_common_scales(tmp_path: Path, method: str) -> None:
    opened = model(tmp_path / "m", "llama")
    one, two = (run(opened, method, workers, Memory(), scheme="nvfp4").linears() for workers in (1, 2))
    assert_equal_within_groups(two)
    assert {n: common(q) for n, q in one.items()} == {n: common(q) for n, q in two.items()}


def test_a_weight_that_outgrows_the_common_scale_is_clipped() -> None:
    weight, scheme = torch.linspace(-8, 8, 64).view(2, 32), parse("nvfp4")
    scales, _ = numerics.minmax_parameters(weight, scheme, reach=2.0)
    q = numerics.quantize(weight, scheme, scales, upper=numerics.super_scales(weight, scheme, 2.0))
    assert q.super_scales is not None
    assert 6 * 448 * float(q.super_scales) >= 2
    assert torch.equal(q.super_scales, numerics.super_scales(torch.full((2, 32), 2.0), scheme))
    back = numerics.dequantize(q)
    assert 2 <= back.abs().max() < 8
    assert torch.equal(back.sign(), weight.sign())
    with pytest.raises(NumericalError):
        numerics.minmax_parameters(torch.full((2, 32), float("inf")), parse("fp8-e4m3-tensor"), reach=2.0)


def test_what_is_apart_keeps_its_own_scale() -> None:
    linears = {"a.q": nn.Linear(32, 8), "a.k": nn.Linear(32, 8), "a.o": nn.Linear(16, 8), "b.q": nn.Linear(32, 8), "a.x": nn.Linear(32, 8)}
    schemes = {**dict.fromkeys(linears, parse("nvfp4")), "a.x": parse("int4-g16-sym")}
    found = reaches(linears, schemes, corrected=False)
    assert found == dict.fromkeys(("a.q", "a.k"), max(float(linears[n].weight.detach().abs().max()) for n in ("a.q", "a.k")))
    assert reaches(linears, schemes, corrected=True) == {n: 2 * v for n, v in found.items()}
    linears["a.k"].weight.data[0, 0] = float("nan")
    assert reaches(linears, schemes, corrected=False)["a.q"] == float(linears["a.q"].weight.detach().abs().max())
