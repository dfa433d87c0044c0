"""Law: an adapter made by peft, merged by qforge, gives the weights that peft's own merge gives, for any rank, alpha, variant and patterns."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from qforge.models.lora import with_adapters
from qforge.models.model import open_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")

# Every example loads and wraps a model, so a failing one is reported as found, not shrunk.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "phases": [Phase.explicit, Phase.reuse, Phase.generate]}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = ["q_proj", "down_proj", "mlp.up_proj", r"layers\.1\.self_attn\.v_proj", r".*\.0\..*_proj", "proj", r"model.layers.[02].mlp.gate_proj"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "llama": tiny.make(root / "llama", seed=1),
        "qwen2": tiny.make(root / "qwen2", "qwen2", seed=2, tied=False, layers=2),
        "gemma3_text": tiny.make(root / "gemma3", "gemma3_text", seed=3, layers=2),
    }


def in_saved_order(patterns: dict[str, int]) -> dict[str, int]:
    """peft sorts keys when it saves, and the first match counts: only in this order does peft itself load what it saved."""
    return dict(sorted(patterns.items()))


def adapt(base: Path, folder: Path, seed: int, **options: object) -> dict[str, torch.Tensor]:
    """Save a peft adapter with random parameters; return the state that peft's merge gives."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return {k: v.clone() for k, v in model.merge_and_unload().state_dict().items()}


options = st.fixed_dictionaries(
    {
        "r": st.integers(1, 9),
        "lora_alpha": st.integers(1, 40),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "target_modules": st.lists(st.sampled_from(LINEARS), min_size=1, unique=True),
        "rank_pattern": st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 8), max_size=3).map(in_saved_order),
        "alpha_pattern": st.dictionaries(st.sampled_from(PATTERNS), st.integers(1, 64), max_size=3).map(in_saved_order),
        "init_lora_weights": st.sampled_from([True, False, "gaussian", "orthogonal"]),
    }
).filter(lambda o: o["init_lora_weights"] != "orthogonal" or (o["r"] % 2 == 0 and all(r % 2 == 0 for r in o["rank_pattern"].values())))


@settings(max_examples=15, **SLOW)
@given(family=st.sampled_from(["llama", "qwen2", "gemma3_text"]), seed=st.integers(0, 2**31), options=options)
def test_merge_equals_pefts(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, family: str, seed: int, options: dict[str, object]) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    want = adapt(bases[family], folder, seed, **options)
    plain = open_model(str(bases[family]))
    got = with_adapters(plain, [(str(folder), 1.0)])
    moved = 0
    for name in got.weights.names():
        ours = got.weights.read(name)
        assert (ours - want[name]).abs().max().item() < 1e-5, name
        moved += not torch.equal(ours, plain.weights.read(name))
    assert moved == got.adapters[0].tensors > 0


@settings(max_examples=4, **SLOW)
@given(weights=st.lists(st.floats(-2, 2), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_several_adapters_add_their_weighted_changes(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, weights: list[float], seed: int) -> None:
    plain = open_model(str(bases["llama"]))
    folders = [tmp_path_factory.mktemp("adapter") for _ in weights]
    alone = [adapt(bases["llama"], folder, seed + i, r=4 + i, target_modules=["q_proj", LINEARS[i]]) for i, folder in enumerate(folders)]
    got = with_adapters(plain, [(str(f), w) for f, w in zip(folders, weights, strict=True)])
    for name in got.weights.names():
        base = plain.weights.read(name)
        want = base + sum((w * (state[name] - base) for w, state in zip(weights, alone, strict=True)), torch.zeros_like(base))
        torch.testing.assert_close(got.weights.read(name), want, atol=1e-5, rtol=1e-5)
