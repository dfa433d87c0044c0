"""Links: the right ones are found in every family, folding changes no logits, what is stored is exact, and what is no link is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qforge.models.blocks import BlockModel
from qforge.models.link_search import find_links
from qforge.models.links import Link, apply, hold, settle
from qforge.models.model import open_model

QKV, MLP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
INNER = {"self_attn.v_proj": ("self_attn.o_proj",), "mlp.up_proj": ("mlp.down_proj",)}
LLAMA = {"input_layernorm": QKV, "post_attention_layernorm": MLP, **INNER}
GEMMA = {"input_layernorm": QKV, "pre_feedforward_layernorm": MLP, **INNER}
EXPECTED = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "granite": LLAMA,
    "stablelm": LLAMA,  # norms with biases
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "olmo2": INNER,  # norms stand behind the linears
    "cohere": {"input_layernorm": QKV + MLP, **INNER},  # attention and MLP side by side
    "starcoder2": {"input_layernorm": QKV, "self_attn.v_proj": ("self_attn.o_proj",), "post_attention_layernorm": ("mlp.c_fc",)},  # GELU between the two others
    "phi3": {
        "input_layernorm": ("self_attn.qkv_proj",),
        "self_attn.qkv_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("mlp.gate_up_proj",),
        "mlp.gate_up_proj": ("mlp.down_proj",),
    },
}
VALUE_HEADS = torch.arange(32).view(2, 1, 16).expand(2, 2, 16).flatten()  # two query heads on each of two KV heads of 16


class Block:
    """A block of a tiny model, materialised."""

    def __init__(self, folder: Path, family: str = "llama", index: int = 1) -> None:
        self.blocks = BlockModel(open_model(str(tiny.make(folder, family))))
        self.probe = next(self.blocks.embed([torch.randint(3, 300, (1, 8), generator=torch.Generator().manual_seed(0))]))
        self.index = index
        self.context = self.blocks.block(index)
        self.module = self.context.__enter__()

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.blocks.run(self.index, self.module, hidden)

    def links(self) -> list[Link]:
        return find_links(self.module, self.run, self.probe)


@pytest.mark.parametrize("family", EXPECTED)
def test_links_are_found_by_running_the_block(tmp_path: Path, family: str) -> None:
    block = Block(tmp_path, family)
    before = {n: p.clone() for n, p in block.module.named_parameters()}
    links = block.links()
    assert {link.source: link.readers for link in links} == EXPECTED[family]
    assert all(torch.equal(p, before[n]) for n, p in block.module.named_parameters())
    assert all(hold([link], block.module, block.run, block.probe) for link in links)
    for link in links:
        norm = "norm" in link.source
        assert link.offset == (1.0 if norm and family.startswith("gemma") else 0.0)
        expected = VALUE_HEADS if "self_attn" in link.source else torch.arange(len(link.columns))
        first = {"self_attn.qkv_proj": 64 + 32, "mlp.gate_up_proj": 128}.get(link.source, 0)
        assert torch.equal(link.columns, expected + first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "stablelm"])
def test_folding_all_blocks_leaves_the_logits_of_the_whole_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    block = Block(tmp_path, family, index=0)
    links = block.links()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(3, 300, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in whole.parameters():
            p.copy_(p.to(dtype))  # as a model of that type has them
        wanted = whole(input_ids=ids).logits
        for i in range(block.blocks.num_blocks):
            for link in links:
                fold = settle(link, whole.model.layers[i], torch.exp(torch.randn(link.channels, generator=torch.Generator().manual_seed(i))), lambda _: dtype)
                assert all(torch.equal(t, t.to(dtype).float()) for t in fold.tensors.values())
                apply(fold, whole.model.layers[i])
        got = whole(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("source", "reader", "size"), [("self_attn.q_proj", "self_attn.o_proj", 64), ("mlp.gate_proj", "mlp.down_proj", 128), ("mlp.down_proj", "mlp.gate_proj", 64)]
)
def test_what_is_no_link_does_not_hold(tmp_path: Path, source: str, reader: str, size: int) -> None:
    block = Block(tmp_path)
    assert not hold([Link(source, (reader,), torch.arange(size), size)], block.module, block.run, block.probe)


def test_a_link_without_one_of_its_readers_does_not_hold(tmp_path: Path) -> None:
    block = Block(tmp_path)
    assert not hold([Link("input_layernorm", QKV[:2], torch.arange(64), 64)], block.module, block.run, block.probe)


class Expert(nn.Module):
    """A block with a linear that is only reached by what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.always, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out = x + self.always(y)
        return out + self.seldom(y) if x.abs().max() > 100 else out


def test_a_linear_that_the_tokens_do_not_reach_forbids_links() -> None:
    module = Expert().requires_grad_(False)
    assert find_links(module, module, torch.randn(1, 4, 8)) == []
    assert [link.readers for link in find_links(module, module, torch.randn(1, 4, 8) * 1000)] == [("always", "seldom")]


def test_factors_become_what_the_stored_tensors_can_hold() -> None:
    module = nn.Module()
    module.norm, module.linear = nn.RMSNorm(4), nn.Linear(4, 4)
    weight = torch.tensor([0.0, 1.0, 60000.0, 1e-7]).half().float()
    module.norm.weight = nn.Parameter(weight)
    fold = settle(Link("norm", ("linear",), torch.arange(4), 4), module, torch.tensor([2.0, 1.3, 0.01, 100.0]), lambda _: torch.float16)
    stored = fold.tensors["norm.weight"]
    assert torch.equal(stored, stored.half().float())
    assert fold.factors.isfinite().all()
    assert torch.equal(fold.factors[[0, 2, 3]], torch.tensor([2.0, 1.0, 1.0]))  # a dead channel takes any factor; overflow and underflow none
    assert torch.equal(stored[[0, 2, 3]], weight[[0, 2, 3]])
    torch.testing.assert_close(stored * fold.factors, weight, rtol=1e-6, atol=0)


def test_a_norm_with_a_bias_takes_powers_of_two() -> None:
    module = nn.Module()
    module.norm, module.linear = nn.LayerNorm(4), nn.Linear(4, 4)
    module.norm.bias = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.0]).bfloat16().float())
    fold = settle(Link("norm", ("linear",), torch.arange(4), 4), module, torch.tensor([3.1, 0.3, 1.1, 5.0]), lambda _: torch.bfloat16)
    assert torch.equal(fold.factors, torch.tensor([4.0, 0.25, 1.0, 4.0]))
    assert torch.equal(fold.tensors["norm.bias"] * fold.factors, module.norm.bias)
