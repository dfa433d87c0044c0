"""Blocks round the inputs of linears whose scheme says so: by the model's own schemes, or by what the caller says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from qforge import numerics
from qforge.errors import UnsupportedError
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.scheme import parse

SCHEME = parse("fp8-e4m3-tensor+fp8-e4m3-tensor-static")
SCALE = torch.tensor(0.25)
NAMES = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj")


@pytest.fixture
def blocks(tmp_path: Path) -> BlockModel:
    return BlockModel(open_model(str(tiny.make(tmp_path / "model", layers=1))))


def test_inputs_are_rounded_before_the_product_while_the_block_is_open(blocks: BlockModel) -> None:
    hidden = list(blocks.embed([torch.arange(3, 40)[None]]))
    seen: dict[str, torch.Tensor] = {}
    with blocks.block(0, rounding=lambda name: numerics.input_rounding(SCHEME, SCALE) if name in NAMES else None) as module:
        linears = blocks.linears(0)
        hooks = [linears[n].register_forward_pre_hook(lambda m, args, n=n: seen.update({n: args[0]})) for n in linears]
        rounded = blocks.run(0, module, hidden[0])
        for hook in hooks:
            hook.remove()
    for name, x in seen.items():
        assert torch.equal((x / SCALE).to(torch.float8_e4m3fn).float() * SCALE, x) == (name in NAMES), name
    with blocks.block(0) as module:
        plain = blocks.run(0, module, hidden[0])
        assert not module._forward_pre_hooks
    assert not torch.equal(rounded, plain)
    with blocks.block(0, rounding=lambda name: None) as module:
        assert torch.equal(blocks.run(0, module, hidden[0]), plain)


def test_what_the_first_block_takes_are_rows_of_the_embedding_that_never_is_whole_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(str(tiny.make(tmp_path / "model", layers=1)))
    model.config.pad_token_id = model.config.vocab_size - 1
    blocks = BlockModel(model)
    ids = torch.tensor([[5, 3, 3, 7], [1, 0, 9, 5]])
    monkeypatch.setattr(blocks, "_read", lambda name: pytest.fail("read in fp32") if name == blocks.embedding_name else model.weights.read(name).float())
    (hidden,) = blocks.embed([ids])
    assert torch.equal(hidden, model.weights.read(blocks.embedding_name).float()[ids])


def test_only_schemes_with_activations_round(blocks: BlockModel) -> None:
    assert numerics.input_rounding(None) is None
    assert numerics.input_rounding(parse("int8-channel-sym")) is None
    round_static = numerics.input_rounding(SCHEME, torch.tensor(0.5))
    assert round_static is not None
    assert round_static(torch.tensor([0.55, 300.0])).tolist() == [0.5625, 224.0]


@pytest.mark.parametrize(("family", "config"), [
    ("falcon", {"new_decoder_architecture": True}), ("bloom", {}), ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    ("gptj", {"rotary_dim": 8}), ("codegen", {"rotary_dim": 8}), ("gpt_neox", {}),
])  # fmt: skip
def test_a_chain_of_blocks_computes_what_the_model_does_also_where_blocks_give_tuples(tmp_path: Path, family: str, config: dict[str, object]) -> None:
    model = open_model(str(tiny.make(tmp_path / "model", family, layers=2, **config)))
    blocks = BlockModel(model)
    ids = torch.randint(3, 300, (2, 21), generator=torch.Generator().manual_seed(0))
    (hidden,) = blocks.embed([ids])
    for index in range(blocks.num_blocks):
        with blocks.block(index) as module, torch.no_grad():
            hidden = blocks.run(index, module, hidden)
    with blocks.head() as logits:
        ours = logits(hidden.flatten(0, 1)).view(2, 21, -1)
    with blocks.whole() as module, torch.no_grad():
        theirs = module(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("family", "config"), [("opt", {}), ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2})])
def test_a_head_takes_more_positions_than_have_embeddings(tmp_path: Path, family: str, config: dict[str, object]) -> None:
    model = open_model(str(tiny.make(tmp_path / "model", family, layers=2, **config)))
    blocks = BlockModel(model)
    hidden = torch.randn(3, 250, blocks.hidden_size, generator=torch.Generator().manual_seed(0))
    assert hidden[..., 0].numel() > model.config.max_position_embeddings
    with blocks.head() as logits:
        together, each = logits(hidden.flatten(0, 1)), [logits(h) for h in hidden]
    torch.testing.assert_close(together, torch.cat(each))
    (inputs,) = blocks.head_inputs([hidden])
    torch.testing.assert_close(inputs, torch.cat([x for h in hidden for x in blocks.head_inputs([h[None]])]))


def test_a_family_of_conv1d_is_refused_for_that(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"GPT2LMHeadModel keeps the weights of its decoder blocks in transformers' Conv1D \(transformer.h.0.attn.c_attn\), and qforge quantizes"
    ):
        BlockModel(open_model(str(tiny.make(tmp_path / "model", "gpt2", layers=2))))
