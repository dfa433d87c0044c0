"""Where the residual stream can be seen is found by running a block of any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.models.residuals import BLOCK, find_residuals

EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "more", "wanted"),
    [
        ("llama", {}, {"self_attn.o_proj": BLOCK, "mlp.down_proj": "post_attention_layernorm"}),
        ("qwen2", {}, {"self_attn.o_proj": BLOCK, "mlp.down_proj": "post_attention_layernorm"}),
        ("phi3", {}, {"self_attn.o_proj": BLOCK, "mlp.down_proj": "post_attention_layernorm"}),
        ("mixtral", EXPERTS, {"self_attn.o_proj": BLOCK}),  # what experts give is weighed by the router first
        ("gemma3_text", {}, {}),  # norms lie between
        ("granite", {}, {}),  # a factor does
        ("gpt_neox", {}, {"mlp.dense_4h_to_h": "post_attention_dropout"}),  # attention and MLP side by side: the former's sum is made after it has run
        ("phi", {}, {}),
    ],
)
def test_linears_whose_output_is_added_as_it_is(family: str, more: dict[str, int], wanted: dict[str, str], tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", family, layers=1, **more))))  # type: ignore[arg-type]
    (hidden,) = blocks.embed([torch.arange(3, 20)[None]])
    with blocks.block(0) as module:
        assert find_residuals(module, lambda x: blocks.run(0, module, x), hidden) == wanted
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
