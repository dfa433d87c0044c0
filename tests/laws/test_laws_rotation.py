"""Law 7 for rotations: a model in turned coordinates computes the same logits, in fp64 and after storing in fp32; what cannot be turned is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import UnsupportedError
from qforge.models import rotation
from qforge.models.model import Model, open_model
from qforge.models.orthogonal import orthogonal
from qforge.models.weights import TensorInfo, WeightSource

WINDOW = list(range(3, 60))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**31))
def test_the_matrix_is_orthogonal_and_spreads_every_channel(size: int, seed: int) -> None:
    q = orthogonal(size, seed)
    formed = q.columns(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(formed @ formed.T, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    assert formed.abs().max() <= (2 / size) ** 0.5 + 1e-12
    weight = torch.randn(size * 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.cat([formed.T @ part for part in weight.split(size)])
    torch.testing.assert_close(q.rows(weight), wanted, atol=1e-12, rtol=0)


class Doubled:
    """A model's weights in fp64, norms not all ones and biases not zero."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._source.info(name).shape, torch.float64)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name).double()
        return tensor if tensor.dim() > 1 else tensor + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))).double()

    def fingerprint(self) -> str:
        return "doubled " + self._source.fingerprint()


def logits_of(model: Model, weights: WeightSource) -> torch.Tensor:
    """By transformers, every weight in fp64."""
    module = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    state = {name: weights.read(name) for name in weights.names()}
    assert all(t.dtype == torch.float64 for t in state.values())
    found = module.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"lm_head.weight"}
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=torch.tensor([WINDOW])).logits
    return logits


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"kv_heads": 4},
    "qwen2": {},
    "qwen3": {"hidden": 96, "heads": 6, "kv_heads": 3},
    "phi3": {},
    "gemma": {},
    "granite": {"residual_multiplier": 0.7},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_turned_models_compute_the_same(tmp_path: Path, family: str) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", family, layers=2, **FAMILIES[family])))
    doubled = Doubled(model.weights)
    turned = rotation.rotated(Model(model.source, model.config, model.spec, doubled, torch.float64, model.assets))
    changed = [n for n in model.weights.names() if not torch.equal(turned.weights.read(n), doubled.read(n))]
    assert len(changed) >= len(model.weights.names()) - 2 * 3 - 2 * 2  # biases of readers and norms of heads stay
    wanted, got = logits_of(model, doubled), logits_of(turned, turned.weights)
    # transformers' norms and softmaxes round to fp32 on their way: where a difference of fp64's last bit flips one of theirs, 6e-8 of it is seen, and grows from block to block
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert not turned.config.tie_word_embeddings
    assert turned.fingerprint() != model.fingerprint()


def test_stored_in_its_own_type_it_is_the_same_model(tmp_path: Path) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", layers=2)))
    before, after = (torch.cat(list(TransformersEngine(m).score([WINDOW]))) for m in (model, rotation.rotated(model)))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "part", "config"),
    [
        ("mixtral", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("gemma3_text", "post_attention_layernorm", {}),
        ("olmo2", "k_proj", {}),
        ("stablelm", "the model", {}),
        ("cohere", "norm", {}),
    ],
)
def test_what_does_not_commute_with_a_rotation_is_refused(tmp_path: Path, family: str, part: str, config: dict[str, Any]) -> None:
    model = open_model(str(tiny.make(tmp_path / "m", family, layers=2, **config)))
    with pytest.raises(UnsupportedError, match=f"method rotate: .*{part}.*leave rotate out"):
        rotation.rotated(model)
