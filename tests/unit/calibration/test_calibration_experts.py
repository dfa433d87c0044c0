"""Calibration of experts: each sees the tokens that the quantized model routes to it, paired with what the original gave the same tokens; what none reaches is rounded and said."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, Spy, schemes_of, windows
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from qforge import numerics
from qforge.calibration import streams
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.streams import BATCH_TOKENS
from qforge.methods import Options, find, find_transforms
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse

NAMES = ("gate_proj", "up_proj", "down_proj")


def make(folder: Path, experts: int = 6, layers: int = 2) -> Path:
    return tiny.make(folder, "qwen3_moe", layers=layers, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=32)


def schemes(blocks: BlockModel) -> dict[str, Scheme]:
    return {n: s for n, s in schemes_of(blocks).items() if n not in blocks.routers}


def routed(model: nn.Module, layer: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the experts of a layer are given: tokens `[N, D]` and their experts `[N, K]`."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = model.get_submodule(f"model.layers.{layer}.mlp.experts").register_forward_pre_hook(lambda _, args: seen.append((args[0], args[1])))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return seen[0]


def inputs(model: nn.Module, layer: int, expert: int, which: str, hidden: torch.Tensor) -> torch.Tensor:
    """Dense fp64: what one expert's projection is fed for all tokens `[N, D]`, wherever they are routed."""
    x = hidden.double()
    if which != "down_proj":
        return x
    gate, up = (x @ model.get_parameter(f"model.layers.{layer}.mlp.experts.gate_up_proj")[expert].double().T).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def place(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a linear's weight where transformers has it."""
    if ".experts." not in name:
        model.get_submodule(name).weight.data = value
        return
    stack, _, rest = name.partition(".experts.")
    expert, which = rest.split(".")
    target = model.get_parameter(f"{stack}.experts.{'down_proj' if which == 'down_proj' else 'gate_up_proj'}").data[int(expert)]
    half = len(target) // 2
    (target if which == "down_proj" else target[:half] if which == "gate_proj" else target[half:]).copy_(value)


@pytest.mark.parametrize("batch_tokens", [BATCH_TOKENS, 10])
@torch.no_grad()
def test_statistics_of_an_expert_are_those_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int) -> None:
    monkeypatch.setattr(streams, "BATCH_TOKENS", batch_tokens)
    folder, ids = make(tmp_path / "m"), windows(24, 10)
    blocks = BlockModel(open_model(str(folder)))
    wanted, memory, spy = schemes(blocks), Memory(), Spy()
    quantize_blocks(Job(blocks, spy, wanted, Options()), ids, memory.store(), SILENT)
    quantized, original = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    changed = compared = skipped = 0
    for name, stats in zip(wanted, spy.seen, strict=True):
        if ".experts." in name:
            layer, expert, which = int(name.split(".")[2]), int(name.split(".")[5]), name.split(".")[6]
            here, index = routed(quantized, layer, ids)
            there, original_index = routed(original, layer, ids)
            mine, theirs = (index == expert).any(1), (original_index == expert).any(1)
            x = inputs(quantized, layer, expert, which, here)
            y = torch.where(theirs[:, None], inputs(original, layer, expert, which, there), x)  # a token that only one stream sends here counts as right
            x, y = x[mine], y[mine]
            assert stats.tokens == len(x)
            assert stats.hessian is not None
            assert stats.cross is not None
            torch.testing.assert_close(stats.hessian.double(), x.T @ x, rtol=1e-3, atol=1e-4 * float((x.T @ x).abs().max()))
            torch.testing.assert_close(stats.cross.double(), (y - x).T @ x, rtol=2e-2, atol=4e-3 * float(x.abs().max() ** 2 * len(x)) ** 0.5)
            changed, compared = changed + int((mine != theirs).sum()), compared + 1
            skipped += int((~mine.view(24, 10).any(1)).sum())
        place(quantized, name, numerics.dequantize(memory.linears()[name]))
    assert compared == 2 * 6 * 3
    assert changed > 0, "no token was routed differently, so that pairing was not tried"
    assert skipped > 0, "every window used every expert, so that no batch skipped one"


def never_reached(folder: Path) -> Path:
    """Expert 3 of layer 0 is one that no token chooses: the router gives it what it gives expert 2, less a lot."""
    tensors = load_file(folder / "model.safetensors")
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    router = tensors["model.layers.0.mlp.gate.weight"]
    router[3] = 0
    router *= 3  # of the other five, two are above zero for nearly every token
    assert torch.equal(norm, torch.ones_like(norm))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_expert_that_no_token_reaches_is_rounded_to_nearest(tmp_path: Path) -> None:
    folder = never_reached(make(tmp_path / "m", layers=1))
    ids = windows(2, 8)
    index = routed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0, ids)[1]
    missing = sorted(set(range(6)) - set(index.flatten().tolist()))
    assert missing, "every expert was reached, so that nothing was tried"
    blocks = BlockModel(open_model(str(folder)))
    memory, gptq = Memory(), find("gptq")
    assert gptq is not None
    quantize_blocks(Job(blocks, gptq, schemes(blocks), Options()), ids, memory.store(), SILENT)
    layers = {layer.name: layer for layer in memory.pieces[0].layers}
    for expert in missing:
        for which in NAMES:
            layer = layers[f"model.layers.0.mlp.experts.{expert}.{which}"]
            assert layer.tokens == 0
            assert layer.note is not None
            assert "never reached" in layer.note
            assert layer.relative_error is not None
            assert layer.relative_error < 0.15
    assert all(torch.isfinite(numerics.dequantize(q)).all() for q in memory.linears().values())


def test_the_static_scale_of_an_expert_without_tokens_is_that_of_the_others(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(never_reached(make(tmp_path / "m", layers=1)))))
    memory, rtn = Memory(), find("rtn")
    assert rtn is not None
    static = {n: parse("int8-channel-sym+int8-tensor-static") for n in schemes(blocks)}
    quantize_blocks(Job(blocks, rtn, static, Options()), windows(2, 8), memory.store(), SILENT)
    tokens = {layer.name: layer.tokens for layer in memory.pieces[0].layers}
    for which in NAMES:
        found = {n: q.input_scale for n, q in memory.linears().items() if n.endswith(which)}
        reached = [float(scale) for n, scale in found.items() if tokens[n] and scale is not None]
        others = [float(scale) for n, scale in found.items() if not tokens[n] and scale is not None]
        assert others
        assert set(others) == {max(reached)}


@pytest.mark.parametrize(("method", "count"), [("gptq", 60), (["awq", "gptq"], 60)])
def test_killed_at_every_block_and_resumed_equals_uninterrupted(tmp_path: Path, method: str | list[str], count: int) -> None:
    model = open_model(str(make(tmp_path / "m", experts=12, layers=3)))
    ids = windows(count, 64)
    assert ids.numel() > BATCH_TOKENS, "there is only one batch, so that no expert is skipped by one of several"
    quantizer = find(method)
    assert quantizer is not None

    def run(memory: Memory) -> dict[str, QuantizedLinear]:
        blocks = BlockModel(model)
        quantize_blocks(Job(blocks, quantizer, schemes(blocks), Options(), transforms=find_transforms(method)), ids, memory.store(), SILENT)
        return memory.linears()

    whole, broken = run(Memory()), Memory()
    for block in range(3):
        broken.die_after = block
        with pytest.raises(KeyboardInterrupt):
            run(broken)
        assert list(broken.pieces) == list(range(block))
    broken.die_after = None
    again = run(broken)
    assert list(again) == list(whole)
    assert all(q.equals(again[n]) for n, q in whole.items())
