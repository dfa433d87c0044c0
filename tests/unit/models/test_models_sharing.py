"""Linears that take the same tensor one after the other are found by running a block of any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.models.sharing import find_followers

LLAMA = {"self_attn.q_proj": ["self_attn.k_proj", "self_attn.v_proj"], "mlp.gate_proj": ["mlp.up_proj"]}


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", LLAMA),
        ("gemma3_text", LLAMA),
        ("phi3", {}),  # fused
        ("gpt_neox", {}),
        ("phi", {"self_attn.q_proj": ["self_attn.k_proj", "self_attn.v_proj"]}),  # the MLP takes it, too, but attention lies between
    ],
)
def test_linears_with_one_input(family: str, wanted: dict[str, list[str]], tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", family, layers=1))))
    (hidden,) = blocks.embed([torch.arange(3, 20)[None]])
    with blocks.block(0) as module:
        linears = {name.removeprefix(f"{blocks.block_names[0]}."): m for name, m in blocks.linears(0).items()}
        assert find_followers(linears, lambda x: blocks.run(0, module, x), hidden) == wanted
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_experts_follow_each_their_own(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", "mixtral", layers=1, num_local_experts=3, num_experts_per_tok=2))))
    (hidden,) = blocks.embed([torch.arange(3, 20)[None]])
    with blocks.block(0) as module:
        found = find_followers(blocks.linears(0), lambda x: blocks.run(0, module, x), hidden)
    assert all(first.rpartition(".")[0] == name.rpartition(".")[0] for first, names in found.items() for name in names)
    assert len(found) > 1
