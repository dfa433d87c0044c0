"""Scales tuned together: gradients against autograd over transformers' whole model in fp64; what it does to the divergence; what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import qforge
from qforge import numerics, pipeline
from qforge.calibration import endtoend
from qforge.calibration.gradients import head
from qforge.calibration.precision import native
from qforge.calibration.room import Room
from qforge.errors import UnsupportedError
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def windows(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 300, (count, 64), generator=torch.Generator().manual_seed(seed))


def rounded(blocks: BlockModel, folder: Path, text: str) -> dict[str, QuantizedLinear]:
    weights, scheme = open_model(str(folder)).weights, parse(text)
    found = {}
    for name in [n for i in range(blocks.num_blocks) for n in blocks.linears(i)]:
        weight = weights.read(f"{name}.weight").float()
        found[name] = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))
    return found


def with_weights(folder: Path, linears: dict[str, QuantizedLinear], dtype: torch.dtype) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for name, q in linears.items():
        linear = model.get_submodule(name)
        linear.weight.data = numerics.dequantize(q).to(dtype)
        linear.register_forward_pre_hook(lambda _, args, scheme=q.scheme: args[0] + (numerics.quantize_activations(args[0].detach().float(), scheme) - args[0]).detach())
    return model


def divergence(folder: Path, linears: dict[str, QuantizedLinear], ids: torch.Tensor, dtype: torch.dtype = torch.float64, step: int = 1) -> tuple[torch.Tensor, torch.nn.Module]:
    """Among every `step`-th token of the vocabulary."""
    model = with_weights(folder, linears, dtype)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(input_ids=ids).logits[..., ::step].log_softmax(-1)
    found = model(input_ids=ids).logits[..., ::step].log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum(-1).mean(), model


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
@pytest.mark.parametrize(
    ("text", "step"), [("int4-g32-asym", 1), ("int4-g32-asym", 3), ("int3-channel-sym", 1), ("fp8-e4m3-channel", 1), ("nf4-g32@f32", 2), ("fp8-e4m3-channel+fp8-e4m3-token", 1)]
)
def test_gradients_by_scales_equal_autograd_over_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, text: str, step: int) -> None:
    monkeypatch.setattr(native, "has_bf16_products", lambda: False)
    tiny.make(tmp_path, family)
    blocks, ids = BlockModel(open_model(str(tmp_path))), windows(3, 1)
    linears = rounded(blocks, tmp_path, text)
    near = 1e-2 if "+" in text else 1e-3  # an activation halfway between two codes goes either way
    wanted, theirs = divergence(tmp_path, linears, ids, step=step)
    wanted.backward()
    inputs = [Room().keep(h) for h in blocks.embed([ids])]
    last = endtoend._last(blocks, inputs, Room(), SILENT)
    with endtoend._student(blocks, linears, {}) as (modules, tuned), head(blocks) as logits:
        likely = [torch.arange(0, blocks.vocab_size, step)] * 2  # 192 positions
        found = endtoend._divergence(blocks, modules, logits, inputs[0].load(), last[0].load(), likely)
        assert tuned.keys() == linears.keys()
        for name, linear in tuned.items():
            expected = theirs.get_submodule(name).weight.grad
            assert linear.module.weight.grad is not None
            assert (linear.module.weight.grad - expected).norm() < near * expected.norm(), name
            q = linear.start
            numbers = q.codes.double() if q.scheme.number.is_int else numerics.decode(q.codes, torch.ones(()), None, q.scheme).double()
            steps = numbers - (0 if q.zeros is None else numerics.expand(q.zeros, q.scheme, q.out_features, q.in_features).double())
            by_scale = (expected * steps).view(*q.scales.shape, -1).sum(-1) * q.scales.double()
            linear.move(1, 0.0)
            assert (linear.mean / (1 - endtoend.MOMENTS[0]) - by_scale).norm() < near * by_scale.norm(), name
    assert found == pytest.approx(wanted.item(), rel=near / 10)


def test_a_head_that_is_no_plain_linear_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_bf16_products", lambda: False)
    tiny.make(tmp_path, "gemma2")
    blocks, hidden, tokens = BlockModel(open_model(str(tmp_path))), torch.randn(5, 64), torch.tensor([7, 3, 250])
    with head(blocks) as logits:
        wanted = [logits(hidden), logits(hidden, tokens)]
    assert torch.allclose(wanted[1], wanted[0][:, tokens], atol=1e-5)
    blocks.output_head = None
    with head(blocks) as logits:
        torch.testing.assert_close([logits(hidden), logits(hidden, tokens)], wanted)


@pytest.mark.parametrize("few", [1, 50])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_likely_tokens_are_those_of_every_128_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, few: int) -> None:
    monkeypatch.setattr(endtoend, "FEW", few)
    monkeypatch.setattr(native, "has_bf16_products", lambda: False)
    monkeypatch.setattr(endtoend, "LIKELY", 0.97)
    tiny.make(tmp_path, family)
    blocks, ids = BlockModel(open_model(str(tmp_path))), windows(3, 1)
    with torch.no_grad():
        p = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(input_ids=ids).logits.softmax(-1).flatten(0, 1)
    last = endtoend._last(blocks, [Room().keep(h) for h in blocks.embed([ids])], Room(), SILENT)
    with head(blocks) as logits:
        found = endtoend._likely(logits, last[0].load())
    assert len(found) == 2
    for tokens, part in zip(found, p.split(128), strict=True):
        wanted = {int(token) for row in part for token in range(len(row)) if row[token] >= 0.97 * row.max()}
        assert len(set(tokens.tolist())) == len(tokens) == min(p.shape[1], -(-len(wanted) // few) * few)
        assert wanted <= set(tokens.tolist())
        assert 0 < len(wanted) < p.shape[1]


def test_the_divergence_falls_on_this_text_and_on_other_text(tmp_path: Path) -> None:
    tiny.make(tmp_path, "llama")
    blocks = BlockModel(open_model(str(tmp_path)))
    linears = rounded(blocks, tmp_path, "int3-g32-sym")
    scales = endtoend.tune(blocks, linears, {}, windows(128, 2), 40, Room(), SILENT)
    assert scales.keys() == linears.keys()
    after = {name: QuantizedLinear(q.scheme, q.codes, scales[name]) for name, q in linears.items()}
    for seed in (2, 3):
        with torch.no_grad():
            before, now = (float(divergence(tmp_path, found, windows(64, seed), torch.float32)[0]) for found in (linears, after))
        assert now < 0.97 * before, (seed, before, now)
    for name, q in after.items():
        assert torch.equal(q.scales, numerics.round_scale(q.scales, q.scheme.scale.type)), name


def test_experts_are_tuned_by_the_tokens_that_they_are_given(tmp_path: Path) -> None:
    """With few tokens in a step some of many experts are given none."""
    tiny.make(tmp_path, "qwen3_moe", layers=1, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=32)
    blocks = BlockModel(open_model(str(tmp_path)))
    weights, scheme = open_model(str(tmp_path)).weights, parse("int4-g32-sym")
    linears = {}
    for name in [n for n in blocks.linears(0) if n not in blocks.routers]:
        weight = weights.read(f"{name}.weight").float() if f"{name}.weight" in weights.names() else blocks_weight(blocks, name)
        linears[name] = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))
    scales = endtoend.tune(blocks, linears, {}, windows(1, 4)[:, :8], 2, Room(), SILENT)
    moved = [name for name, q in linears.items() if not torch.equal(scales[name], q.scales)]
    assert any("experts" in name for name in moved)
    assert any("experts" in name for name in linears.keys() - set(moved))


def blocks_weight(blocks: BlockModel, name: str) -> torch.Tensor:
    """Of one expert, out of the tensor that transformers keeps all of them in."""
    with blocks.block(0):
        return blocks.linears(0)[name].weight.detach().clone()


def recipe(folder: Path, options: str, method: str = "gptq", scheme: str = "int4-g32-sym") -> Path:
    if not (folder / "m").exists():
        tiny.make(folder / "m", "llama", layers=2)
    text = f"""
version: 1
model: {{source: m}}
calibration: {{samples: 4, sequence_length: 64}}
quantize: {{method: {method}, scheme: {scheme}, options: {options}}}
evaluate: null
"""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "fp8-dynamic"])
def test_a_run_tunes_scales_alone_and_takes_them_up_again(tmp_path: Path, scheme: str) -> None:
    qforge.quantize(recipe(tmp_path, "{}", scheme=scheme), out=tmp_path / "plain")
    first = qforge.quantize(recipe(tmp_path, "{tune: 3}", scheme=scheme), out=tmp_path / "tuned")
    again = qforge.quantize(recipe(tmp_path, "{tune: 3}", scheme=scheme), out=tmp_path / "tuned")
    other = qforge.quantize(recipe(tmp_path, "{tune: 3}", scheme=scheme), out=tmp_path / "other")
    assert again.work["computed"] == 0
    assert first.artifact["sha256"] == again.artifact["sha256"] == other.artifact["sha256"]
    plain, tuned = (open_model(str(tmp_path / name / "model")) for name in ("plain", "tuned"))
    assert len(plain.schemes) == 14
    original = open_model(str(tmp_path / "m")).weights
    assert first.layers == again.layers
    for layer in first.layers:
        if layer.scheme is not None:
            weight, found = original.read(f"{layer.name}.weight").float(), numerics.dequantize(tuned.linear(layer.name))
            assert layer.relative_error == pytest.approx(float((found - weight).norm() / weight.norm()), rel=1e-4)
            assert layer.output_error is None  # what was measured is of the scales before
    for name in plain.schemes:
        a, b = plain.linear(name), tuned.linear(name)
        assert torch.equal(a.codes, b.codes)
        assert not torch.equal(a.scales, b.scales)
        assert (b.scales / a.scales - 1).abs().max() < 0.02  # three steps of at most RATE, and the rounding of scales


def test_errors_by_weights_that_were_folded_are_not_known_after_tuning(tmp_path: Path) -> None:
    layers = qforge.quantize(recipe(tmp_path, "{tune: 2}", method="[awq, gptq]"), out=tmp_path / "out").layers
    assert {(layer.relative_error, layer.output_error) for layer in layers if layer.scheme} == {(None, None)}


@pytest.mark.parametrize(
    ("method", "scheme", "message"),
    [
        ("rtn", "int4-g32-sym", "method rtn takes none"),
        ("gptq", "nvfp4", "is for one scale .* for each output channel or group"),
        ("gptq", "mxfp4", "no power of two"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path: Path, method: str, scheme: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        pipeline.plan(recipe(tmp_path, "{tune: 3}", method, scheme))
