"""Transforms in the block loop: the blocks keep their function, quantized linears see what was folded, killed runs end with the same tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, Spy, inputs_of, schemes_of, windows
from transformers import AutoModelForCausalLM

from qforge import numerics
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.methods import Options, find, find_transforms
from qforge.models.blocks import BlockModel
from qforge.models.model import Model, open_model
from qforge.progress import SILENT


def job(model: Model, method: str | list[str], text: str = "int4-g32-sym", **kwargs: object) -> Job:
    blocks, quantizer = BlockModel(model), find(method)
    assert quantizer is not None
    return Job(blocks, quantizer, schemes_of(blocks, text), Options(**kwargs), transforms=find_transforms(method))  # type: ignore[arg-type]


def tensors_of(memory: Memory) -> dict[str, torch.Tensor]:
    return {n: t for p in memory.pieces.values() for n, t in p.tensors.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("method", [["awq", "rtn"], ["smoothquant", "rtn"]])
def test_the_model_is_the_same_before_rounding(tmp_path: Path, family: str, method: list[str]) -> None:
    """At 8 bits little is lost; a fold that went wrong would be seen at once, as is the lack of the changed norms and biases."""
    folder, memory = tiny.make(tmp_path / "m", family), Memory()
    quantize_blocks(job(open_model(str(folder)), method, "int8-g32-sym" if "awq" in method else "int8-channel-sym+int8-token"), windows(), memory.store(), SILENT)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = whole(input_ids=windows()).logits
        for name, q in memory.linears().items():
            whole.get_submodule(name).weight.copy_(numerics.dequantize(q))
        unfolded = whole(input_ids=windows()).logits
        for name, value in tensors_of(memory).items():
            whole.get_parameter(name).copy_(value)
        got = whole(input_ids=windows()).logits
    assert tensors_of(memory)
    assert family != "qwen2" or any(n.endswith("v_proj.bias") for n in tensors_of(memory))
    assert (got - wanted).std() < 0.05 * wanted.std()
    assert (unfolded - wanted).std() > 3 * (got - wanted).std()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_statistics_are_those_of_two_whole_models(tmp_path: Path, family: str) -> None:
    """Both streams are in the folded domain: the original's inputs are divided by what the quantized model's norms were."""
    folder, memory, spy = tiny.make(tmp_path / "m", family), Memory(), Spy()
    base = job(open_model(str(folder)), ["awq", "gptq"])
    quantize_blocks(Job(base.blocks, spy, base.schemes, Options(), transforms=base.transforms), windows(), memory.store(), SILENT)
    quantized, original = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    changed = tensors_of(memory)
    for name, value in changed.items():
        quantized.get_parameter(name).data = value
    inner = ("o_proj", "down_proj")  # their factors show in no stored tensor
    for name, stats in zip(base.schemes, spy.seen, strict=True):
        norm = name.rpartition(".")[0].replace("self_attn", "input_layernorm").replace("mlp", "post_attention_layernorm") + ".weight"
        x, y = inputs_of(quantized, name, windows()), inputs_of(original, name, windows())
        assert stats.hessian is not None
        assert stats.cross is not None
        if not name.endswith(inner):
            torch.testing.assert_close(stats.hessian.double(), x.T @ x, rtol=1e-3, atol=1e-4 * float((x.T @ x).abs().max()))
            ratio = original.get_parameter(norm).detach() / changed[norm] if norm in changed else torch.ones(x.shape[1])
            wanted = (y / ratio - x).T @ x
            torch.testing.assert_close(stats.cross.double(), wanted, rtol=1e-2, atol=3e-3 * float(x.abs().max() ** 2 * len(x)) ** 0.5)
        quantized.get_submodule(name).weight.data = numerics.dequantize(memory.linears()[name])


@pytest.mark.parametrize("method", ["awq", ["awq", "gptq"], ["smoothquant", "awq", "gptq"]])
def test_resumed_equals_uninterrupted(tmp_path: Path, method: str | list[str]) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", "qwen2", dtype=torch.bfloat16)))

    def run(memory: Memory) -> None:
        quantize_blocks(job(model, method, "int4-g32-sym+int8-token"), windows(), memory.store(), SILENT)

    whole = Memory()
    run(whole)
    for keep_hidden in (True, False):
        broken = Memory()
        for block in (1, 2):  # killed twice
            broken.die_after = block
            with pytest.raises(KeyboardInterrupt):
                run(broken)
            if not keep_hidden:
                broken.hidden = {}
        broken.die_after = None
        run(broken)
        assert all(q.equals(broken.linears()[n]) for n, q in whole.linears().items()), keep_hidden
        assert tensors_of(whole).keys() == tensors_of(broken).keys()
        assert tensors_of(whole)
        assert all(torch.equal(t, tensors_of(broken)[n]) and torch.equal(t, t.bfloat16().float()) for n, t in tensors_of(whole).items()), keep_hidden


def test_links_with_an_unquantized_linear_are_left_alone(tmp_path: Path) -> None:
    base = job(open_model(str(tiny.make(tmp_path / "m", "qwen2"))), "awq")
    schemes = {n: s for n, s in base.schemes.items() if not n.endswith(("k_proj", "v_proj"))}
    memory = Memory()
    quantize_blocks(Job(base.blocks, base.quantizer, schemes, Options(), transforms=base.transforms), windows(), memory.store(), SILENT)
    assert {n.partition(".post_")[0] for n in tensors_of(memory)} == {f"model.layers.{i}" for i in range(3)}
