"""Adapters beyond plain linears (whole tensors, embeddings, biases, ties, vocabularies, tokenizers), and one clear refusal for each that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qforge.errors import ModelError
from qforge.models.adapter_base import other_base
from qforge.models.adapter_config import read_adapter_config
from qforge.models.assets import end_ids
from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.pipeline import plan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("lora") / "tied", layers=2)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("lora") / "untied", "qwen2", layers=2, tied=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))


def adapt(base: Path, folder: Path, *, prepare: Callable[[Any], None] = lambda m: None, config: Any = None, **options: Any) -> PeftModel:
    """Save an adapter with random parameters; return the model with the adapter beside it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prepare(model)
    wrapped = get_peft_model(model, config or LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"], **options}))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def logits(model: Any, count: int = 300) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(0, count, 7)[None]).logits


def merged_model(model: Model) -> Any:
    """transformers' model with our merged tensors."""
    built = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    state = {n: model.weights.read(n).float() for n in model.weights.names()}
    missing, unexpected = built.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    built.tie_weights()
    return built


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["input_layernorm", "norm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_merged_model_computes_what_base_and_adapter_compute(tied: Path, untied: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    base = tied if kind == "tied" else untied
    if kind == "untied" and "ensure_weight_tying" in options:
        options = {k: v for k, v in options.items() if k != "ensure_weight_tying"}
    want = logits(adapt(base, tmp_path / "a", **options))
    got = with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)
    torch.testing.assert_close(logits(merged_model(got)), want, atol=5e-4, rtol=1e-4)
    assert got.spec is not None
    assert got.spec.tied_head == got.config.tie_word_embeddings
    assert bool(got.adapters[0].notes) == (kind == "tied" and not got.config.tie_word_embeddings)


@pytest.mark.parametrize("options", [{"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}])
def test_biases(untied: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    want = adapt(untied, tmp_path / "a", target_modules=["q_proj", "v_proj"], **options).merge_and_unload().state_dict()
    got = with_adapters(open_model(str(untied)), [("a", 1.0)], folder=tmp_path)
    for name in got.weights.names():
        torch.testing.assert_close(got.weights.read(name), want[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_added_tokens_bring_their_embeddings_and_tokenizer(tied: Path, untied: Path, tmp_path: Path, kind: str) -> None:
    base = tied if kind == "tied" else untied
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    wrapped = adapt(base, tmp_path / "a", prepare=lambda m: m.resize_token_embeddings(len(tokenizer)), target_modules=["q_proj"])
    want = logits(wrapped, 386)
    wrapped.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "a")
    got = with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)
    assert got.config.vocab_size == 386
    torch.testing.assert_close(logits(merged_model(got), 386), want, atol=5e-4, rtol=1e-4)
    assert got.tokenizer().encode("<tool>") == [384]
    assert got.tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert any("386" in note for note in got.adapters[0].notes)
    state = load_file(tmp_path / "a" / WEIGHTS)
    save_file({k: v for k, v in state.items() if "lora" in k}, tmp_path / "a" / WEIGHTS)
    with pytest.raises(ModelError, match="386 tokens, but the merged model has embeddings for 384"):
        with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_an_end_token_that_an_adapters_tokenizer_brings_ends_texts(untied: Path, tmp_path: Path, has_generation_config: bool) -> None:
    """An adapter for chat ends its turns with a token of its own, and says so in its tokenizer alone; whoever loads the merged model stops there, too."""
    base = shutil.copytree(untied, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    before = [i for i in range(tokenizer.eos_token_id + 3) if i != tokenizer.eos_token_id][-1]
    (base / "generation_config.json").unlink(missing_ok=True)
    if has_generation_config:
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": before, "temperature": 0.5}))
    else:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"eos_token_id": before, "bos_token_id": 1}))
    adapt(base, tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    got = with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)
    told = json.loads((got.assets / "generation_config.json").read_text())
    assert told["eos_token_id"] == [before, tokenizer.eos_token_id]
    assert told.get("temperature") == (0.5 if has_generation_config else None)
    assert has_generation_config or told["bos_token_id"] == 1
    assert end_ids(got.assets, got.config) == [before, tokenizer.eos_token_id]


def test_an_adapter_without_a_tokenizer_keeps_the_bases(tied: Path, tmp_path: Path) -> None:
    adapt(tied, tmp_path / "a")
    model = open_model(str(tied))
    got = with_adapters(model, [("a", 1.0)], folder=tmp_path)
    assert got.assets == model.assets
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ 'x' }}")
    again = with_adapters(model, [("a", 1.0)], folder=tmp_path)
    assert again.tokenizer().chat_template == "{{ 'x' }}"
    assert again.fingerprint() != got.fingerprint()


def test_the_report_says_how_far_weights_moved(tied: Path, tmp_path: Path) -> None:
    adapt(tied, tmp_path / "a", target_modules=["q_proj", "down_proj"], modules_to_save=["model.norm"], use_rslora=True)
    plain = open_model(str(tied))
    got = with_adapters(plain, [("a", 1.0)], folder=tmp_path)
    names = [f"model.layers.{i}.{m}.weight" for i in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")]
    relative = [((got.weights.read(n) - plain.weights.read(n)).norm() / plain.weights.read(n).norm()).item() for n in names]
    report = got.adapters[0]
    assert (report.method, report.rank, report.tensors, report.replaced) == ("rsLoRA", 4, 4, ("model.norm.weight",))
    assert report.relative_delta_mean == pytest.approx(sum(relative) / 4, rel=1e-3)
    assert report.relative_delta_max == pytest.approx(max(relative), rel=1e-3)


def test_the_merge_is_in_fp32_before_the_models_dtype(tied: Path, tmp_path: Path) -> None:
    want = adapt(tied, tmp_path / "a").merge_and_unload().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    got = with_adapters(open_model(str(tied), dtype="bfloat16"), [("a", 1.0)], folder=tmp_path)
    ours = got.weights.read("model.layers.0.self_attn.q_proj.weight")
    assert ours.dtype == torch.bfloat16
    assert (ours != want.bfloat16()).float().mean() < 0.01  # sums in another order may round the other way
    one, two = (with_adapters(open_model(str(tied)), [("a", w)], folder=tmp_path).fingerprint() for w in (1.0, 0.5))
    assert one != two


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("zero", [1, 2])
def test_a_base_weight_of_zeros_as_added_blocks_have_it_is_merged_and_told_without_a_relative_change(tied: Path, tmp_path: Path, zero: int) -> None:
    base = Path(shutil.copytree(tied, tmp_path / "base"))
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    tensors = load_file(base / "model.safetensors")
    save_file({n: t * 0 if n in names[2 - zero :] else t for n, t in tensors.items()}, base / "model.safetensors", metadata={"format": "pt"})
    adapt(base, tmp_path / "a")
    model = with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)
    (report,) = model.adapters
    json.dumps(asdict(report), allow_nan=False)
    assert report.tensors == 2
    assert (report.relative_delta_mean is None) == (zero == 2)
    assert report.relative_delta_max == report.relative_delta_mean
    assert model.weights.read(names[1]).abs().max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {f"{Q}.lora_A.weight": torch.zeros(4, 65)}, r"q_proj' is \[4, 65\].*\[64, 64\].*\[4, 64\]"),
        (lambda s: s | {f"{Q}.lora_B.weight": torch.zeros(63, 4)}, r"\[63, 4\]"),
        (lambda s: s | {f"{Q}.lora_A.weight": torch.zeros(5, 64), f"{Q}.lora_B.weight": torch.zeros(64, 5)}, "rank 4"),
        (lambda s: {k: v for k, v in s.items() if k != f"{Q}.lora_B.weight"}, "no B matrix"),
        (lambda s: s | {f"{Q}.lora_B.bias": torch.zeros(64)}, "bias"),
        (lambda s: s | {f"{Q}.lora_magnitude_vector": torch.zeros(64)}, "magnitude"),
        (lambda s: {k.replace("self_attn", "attention"): v for k, v in s.items()}, "the base has no module for"),
        (lambda s: {k.replace("layers.1", "layers.9"): v for k, v in s.items()}, r"layers\.9"),
        (lambda s: s | {"base_model.model.model.norm.weight": torch.ones(65)}, r"'model\.norm\.weight' as \[65\], the base has \[64\]"),
        (lambda s: s | {"base_model.model.model.embed_tokens.weight": torch.ones(390, 60)}, r"\[390, 60\]"),
        (lambda s: s | {"base_model.model.score.weight": torch.ones(2, 64)}, r"score\.weight"),
        (lambda s: s | {f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}, "not finite"),
        (lambda s: {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 64)}, "no B matrix"),
        (lambda s: {}, "holds no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tied: Path, tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    adapt(tied, tmp_path / "a")
    spoil(tmp_path / "a", change)
    with pytest.raises(ModelError, match=message):
        with_adapters(open_model(str(tied)), [("a", 1.0)], folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "type IA3"),
        ({"peft_type": None}, "type None"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"use_qalora": True, "layer_replication": [[0, 1]]}, "layer_replication, use_qalora"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"init_lora_weights": "pissa"}, "'pissa' changed the base"),
        ({"r": 0}, "rank of 0"),
        ({"r": "8"}, "rank of '8'"),
        ({"lora_alpha": None}, "alpha of None"),
        ({"rank_pattern": {"q_proj(": 3}}, "not a regular expression"),
        ({"rank_pattern": [3]}, "rank_pattern"),
        ({"use_dora": True}, "magnitude"),
    ],
)
def test_configs_that_are_refused(tied: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    adapt(tied, tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        with_adapters(open_model(str(tied)), [("a", 1.0)], folder=tmp_path)


def test_files_that_are_missing_or_damaged_are_refused(tied: Path, tmp_path: Path) -> None:
    adapt(tied, tmp_path / "a")
    model = open_model(str(tied))

    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=message):
            with_adapters(model, [("a", 1.0)], folder=tmp_path)

    whole = (tmp_path / "a" / WEIGHTS).read_bytes()
    (tmp_path / "a" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    refused("cut short")
    (tmp_path / "a" / WEIGHTS).unlink()
    refused(f"has no {WEIGHTS}")
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"x")
    refused("pickle")
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    refused("not JSON")
    (tmp_path / "a" / "adapter_config.json").unlink()
    refused("is no adapter")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ModelError, match=r"no adapter at '\./a'"):
        with_adapters(model, [("./a", 1.0)], folder=tmp_path)


def test_other_methods_and_layers_are_refused(tied: Path, tmp_path: Path) -> None:
    adapt(tied, tmp_path / "ia3", config=IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ModelError, match="type IA3"):
        with_adapters(open_model(str(tied)), [("ia3", 1.0)], folder=tmp_path)
    gpt2 = tiny.make(tmp_path / "gpt2", "gpt2", layers=1)
    adapt(gpt2, tmp_path / "conv", target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(ModelError, match="Conv1D"):
        with_adapters(open_model(str(gpt2)), [("conv", 1.0)], folder=tmp_path)


@pytest.mark.parametrize(
    ("recorded", "source", "told"),
    [
        ("org/Tied-Instruct", "tied", "'org/Tied-Instruct'"),
        ("tied-v0.2/", "tied", "'tied-v0.2'"),
        ("~/secret/other", "tied", "'other'"),
        ("/hub/models--org--other/snapshots/0123abcd", "tied", "'other'"),
        ("org/TIED", "tied", None),
        (r"C:\models\tied", "tied/", None),
        ("/hub/models--org--tied/snapshots/0123abcd", "./tied", None),
        ("org/tied", "linked", None),
        ("org/tied-unsloth-bnb-4bit", "tied", None),
        ("", "tied", None),
        (None, "tied", None),
        (7, "tied", None),
    ],
)
def test_an_adapter_of_another_base_is_told(tied: Path, tmp_path: Path, recorded: Any, source: str, told: str | None) -> None:
    adapt(tied, tmp_path / "a")
    (tmp_path / "tied").symlink_to(tied)
    (tmp_path / "linked").symlink_to(tied)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": recorded}))
    notes = with_adapters(open_model(source, folder=tmp_path), [("a", 1.0)], folder=tmp_path).adapters[0].notes
    assert notes == (() if told is None else (f"the adapter 'a' was made for {told}, by its adapter_config.json; here it is merged into 'tied'",))
    if told is not None:
        recipe = {"version": 1, "model": {"source": source}, "adapters": [{"source": "a"}], "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}}
        (tmp_path / "r.yaml").write_text(json.dumps(recipe))
        assert notes[0] in plan(tmp_path / "r.yaml")[1].notes


@pytest.mark.parametrize(
    ("recorded", "source", "same"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "demo", True),
        ("HuggingFaceTB/SmolLM2-135M", "demo", False),
        ("org/Mill-8B", "files/mill-8b-Q4_K_M.gguf", True),
        ("org/Mill-8B", "files/mill-8b.IQ2_XXS.gguf", True),
        ("org/Mill-8B", "org/Mill-8B-GGUF", True),
        ("org/Mill-8B", "files/mill-8b-instruct-q8_0.gguf", False),
        ("org/Mill-7B-v0.1", "org/Mill-7B-v0.2", False),
    ],
)
def test_names_of_bases(tmp_path: Path, recorded: str, source: str, same: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "base_model_name_or_path": recorded}))
    assert (other_base("a", read_adapter_config(tmp_path), source, tmp_path) is None) == same


def test_combinations_without_one_meaning_are_refused(tied: Path, tmp_path: Path) -> None:
    model = open_model(str(tied))
    for name, options in {"lora": {}, "dora": {"use_dora": True}, "norm": {"modules_to_save": ["norm"]}, "up": {"target_modules": ["up_proj"]}}.items():
        adapt(tied, tmp_path / name, **options)
    for adapters, message in (
        ([("dora", 0.5)], "weight 0.5: DoRA"),
        ([("norm", 2.0)], "whole tensors"),
        ([("lora", 1.0), ("dora", 1.0)], "depend on their order"),
        ([("norm", 1.0), ("norm", 1.0)], "brings the whole tensor"),
    ):
        with pytest.raises(ModelError, match=message):
            with_adapters(model, adapters, folder=tmp_path)
    both = with_adapters(model, [("dora", 1.0), ("up", 0.5)], folder=tmp_path)
    assert [r.source for r in both.adapters] == ["dora", "up"]
