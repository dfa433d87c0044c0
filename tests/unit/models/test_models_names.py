"""Names: the row permutation is llama.cpp's and is undone exactly; every tensor of every family has a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import MambaConfig

from qforge.errors import UnsupportedError
from qforge.models import names
from qforge.models.model import open_model


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_permutation_interleaves_the_halves_of_each_head(heads: int) -> None:
    weight = torch.arange(heads * 6 * 5).reshape(heads * 6, 5)
    permuted = names.permute_rows(weight, heads)
    for h in range(heads):
        for j in range(3):
            assert torch.equal(permuted[h * 6 + 2 * j], weight[h * 6 + j])
            assert torch.equal(permuted[h * 6 + 2 * j + 1], weight[h * 6 + 3 + j])
    assert torch.equal(names.unpermute_rows(permuted, heads), weight)
    assert torch.equal(names.unpermute_rows(names.permute_rows(weight[:, 0], heads), heads), weight[:, 0])


@pytest.mark.parametrize("family", list(names.GGUF_ARCHITECTURES))
def test_every_tensor_has_one_name(tmp_path: Path, family: str) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", family, layers=2)))
    found = names.gguf_names(model.config)
    assert set(model.weights.names()) <= set(found)
    assert len(set(found.values())) == len(found)
    assert names.gguf_permutes(family) == (family in ("llama", "mistral", "mixtral", "smollm3", "granite"))


def test_what_is_permuted_and_offset() -> None:
    assert names.permuted_heads("model.layers.3.self_attn.q_proj.weight", 8, 2) == 8
    assert names.permuted_heads("model.layers.3.self_attn.k_proj.bias", 8, 2) == 2
    assert names.permuted_heads("model.layers.3.self_attn.k_norm.weight", 8, 2) is None
    assert names.gguf_norm_offset("gemma3_text", "model.layers.0.self_attn.q_norm.weight") == 1.0
    assert names.gguf_norm_offset("gemma3_text", "model.layers.0.input_layernorm.weight") == 1.0
    assert names.gguf_norm_offset("gemma3_text", "model.norm.weight") == 1.0
    assert names.gguf_norm_offset("gemma3_text", "model.layers.0.mlp.up_proj.weight") == 0.0
    assert names.gguf_norm_offset("gemma", "model.norm.weight") == 1.0
    assert names.gguf_norm_offset("llama", "model.norm.weight") == 0.0


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'mamba'.*known are llama"):
        names.gguf_names(MambaConfig())


def test_fused_linears_have_names_of_their_own() -> None:
    assert names.attention_inputs("phi3") == ("self_attn.qkv_proj",)
    assert names.mlps("phi3", None) == [(("mlp.gate_up_proj",), "mlp.down_proj")]
    assert names.attention_inputs("llama") == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert names.mlps("llama", None) == [(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")]
