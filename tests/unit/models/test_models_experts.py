"""Fused experts taken apart: the same outputs as transformers' own modules, the names of checkpoints, routers found, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import UnsupportedError
from qforge.models import experts
from qforge.models.blocks import BlockModel
from qforge.models.link_search import find_links
from qforge.models.model import open_model

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(folder: Path, family: str, **settings: Any) -> Path:
    return tiny.make(folder, family, **{"layers": 2, **FAMILIES[family], **settings})


def meta(family: str, **settings: Any) -> nn.Module:
    config = AutoConfig.for_model(family, **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, **settings})
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "m", family)
    window = torch.randint(3, 300, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = whole(input_ids=torch.tensor([window])).logits[0, :-1]
    torch.testing.assert_close(torch.cat(list(TransformersEngine(open_model(str(folder))).score([window]))), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "m", family)
    with safe_open(folder / "model.safetensors", "pt") as f:
        stored = set(f.keys())
    model = open_model(str(folder))
    assert set(model.weights.names()) == stored
    blocks = BlockModel(model)
    linears = {f"{name}.weight" for i in range(2) for name in blocks.linears(i)}
    assert linears <= stored
    assert sum(".experts." in name for name in linears) == 2 * 3 * (FAMILIES[family].get("num_experts") or FAMILIES[family]["num_local_experts"])
    assert {f"{name}.weight" for name in blocks.routers} <= stored


@pytest.mark.parametrize(("family", "beside"), [("mixtral", {"block_sparse_moe.gate"}), ("qwen3_moe", {"mlp.gate"}), ("qwen2_moe", {"mlp.gate", "mlp.shared_expert_gate"})])
def test_routers_are_found_and_nothing_else(tmp_path: Path, family: str, beside: set[str]) -> None:
    blocks = BlockModel(open_model(str(make(tmp_path / "m", family))))
    assert set(blocks.routers) == {f"model.layers.{i}.{name}" for i in range(2) for name in beside}


def test_a_shared_expert_as_wide_as_there_are_experts_is_no_router() -> None:
    module = meta("qwen2_moe", num_experts=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    experts.split(module)
    assert {name.rpartition(".")[2] for name in experts.routers(module)} == {"gate", "shared_expert_gate"}


@pytest.mark.parametrize("family", ["deepseek_v2", "ernie4_5_moe", "glm4_moe", "minimax_m2", "nemotron_h", "exaone_moe"])
def test_families_that_nobody_named_are_taken_apart(family: str) -> None:
    module = meta(family)
    stacks = sum(p.dim() == 3 and "expert" in n for n, p in module.named_parameters())
    names = experts.split(module)
    assert stacks
    assert set(module.state_dict()) == set(names)
    assert not any(p.dim() == 3 and "expert" in n for n, p in module.named_parameters())
    assert all(f".experts.{n.split('.experts.')[1].split('.')[0]}." in stored for n, stored in names.items() if ".experts." in n and n.endswith("proj.weight"))


@pytest.mark.parametrize(("family", "reason"), [("gpt_oss", "transposed"), ("granitemoe", "keep .* as a stack")])
def test_experts_that_cannot_be_taken_apart_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        experts.split(meta(family))


def test_a_stack_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = meta("mixtral")
    stack = type(module.get_submodule("model.layers.0.mlp.experts"))
    forward: Callable[..., torch.Tensor] = stack.forward.__wrapped__  # type: ignore[attr-defined]  # transformers' own, under its choice of implementations
    for change in (lambda *args: 1.01 * forward(*args), lambda self, x: x):
        monkeypatch.setattr(stack, "forward", change)
        with pytest.raises(UnsupportedError, match="computes something else"):
            experts.split(meta("mixtral"))


def test_an_expert_knows_its_tokens_and_nobody_else_does(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(make(tmp_path / "m", "qwen2_moe"))))
    (hidden,) = blocks.embed([torch.arange(3, 43)[None]])
    seen: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    with blocks.block(0) as module:
        for name, linear in blocks.linears(0).items():
            linear.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, (args[0], experts.routed_rows())))
        blocks.run(0, module, hidden)
    shared = seen["model.layers.0.mlp.shared_expert.up_proj"][0]
    inside = {n: v for n, v in seen.items() if ".experts." in n}
    assert all(rows is None for n, (_, rows) in seen.items() if n not in inside)
    assert sum(len(x) for n, (x, _) in inside.items() if n.endswith("up_proj")) == 40 * 2
    for name, (x, rows) in inside.items():
        assert rows is not None
        assert name.endswith("down_proj") or torch.equal(x, shared[rows])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_links_inside_experts_are_found_and_none_through_the_router(tmp_path: Path, family: str) -> None:
    blocks = BlockModel(open_model(str(make(tmp_path / "m", family))))
    (hidden,) = blocks.embed([torch.arange(3, 11)[None]])
    with blocks.block(0) as module:
        links = find_links(module, lambda x: blocks.run(0, module, x), hidden)
    inside = {blocks.full_name(0, link.source): [blocks.full_name(0, n) for n in link.readers] for link in links if ".experts." in link.source}
    count = FAMILIES[family].get("num_experts") or FAMILIES[family]["num_local_experts"]
    assert len(inside) == count
    for source, readers in inside.items():
        assert readers == [source.replace("up_proj", "down_proj").replace("w3", "w2")]
    assert not any("post_attention" in link.source for link in links)
    assert any("self_attn.v_proj" in link.source for link in links)
