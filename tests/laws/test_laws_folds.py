"""Law 7: factors folded into a link leave a block's fp64 output unchanged; families without and with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from qforge.models.blocks import BlockModel
from qforge.models.link_search import find_links
from qforge.models.links import Link
from qforge.models.model import open_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}


def fold(module: nn.Module, link: Link, factors: torch.Tensor) -> None:
    """Divide what the source puts out, multiply the columns that read it; fp64 and from the definition of a link."""
    source = module.get_submodule(link.source)
    for name, p in source.named_parameters(recurse=False):
        shift = link.offset if name == "weight" else 0.0
        p.copy_((p + shift) / (factors[:, None] if p.dim() == 2 else factors) - shift)
    for name in link.readers:
        weight = module.get_submodule(name).weight
        weight.mul_(torch.where(link.columns >= 0, factors[link.columns.clamp(min=0)], torch.ones(()).double()))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_folds_leave_the_output_as_it_is(tmp_path: Path, family: str) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", family, layers=2, **FAMILIES[family]))))
    tokens = torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    hidden, probe = blocks.embed([tokens, tokens[:1]])
    with blocks.block(1) as module:
        links = find_links(module, lambda x: blocks.run(1, module, x), probe)
        assert len(links) >= 2
        module.double()
        wanted = blocks.run(1, module, hidden.double())
        assert wanted.dtype == torch.float64
        for seed, link in enumerate(links):
            factors = torch.exp2(torch.rand(link.channels, generator=torch.Generator().manual_seed(seed)).double() * 8 - 4)
            factors = torch.where(torch.isin(torch.arange(link.channels), link.columns), factors, torch.ones(()).double())  # channels that nobody reads
            fold(module, link, factors)
        got = blocks.run(1, module, hidden.double())
    # transformers' norms and softmaxes round to fp32 on their way: where a difference of fp64's last bit flips one of theirs, 6e-8 of it is seen
    difference = (got - wanted).abs() / (wanted - hidden).abs().max()
    assert difference.max() < 1e-6
    assert family == "gemma3_text" or difference.median() < 1e-13  # Gemma's norms give fp32
