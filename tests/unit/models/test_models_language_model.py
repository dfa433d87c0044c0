"""The language model of a multimodal checkpoint: on texts it is what transformers' whole model is, whichever names its tensors have, and everything runs on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, Mistral3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import qforge
from qforge.errors import ModelError
from qforge.export.inspection import inspect
from qforge.models.lora import with_adapters
from qforge.models.model import open_model
from qforge.runtime import LLM, SamplingParams

TEXTS = {"gemma3": ("gemma3_text", {"sliding_window": 20, "query_pre_attn_scalar": 16}), "mistral3": ("mistral", {"tied": False, "sliding_window": None})}
WIDTHS = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64, "image_size": 28, "patch_size": 14}


def multimodal(folder: Path, family: str) -> Path:
    """A seeded model of vision and text, as transformers writes it."""
    text, options = TEXTS[family]
    alone = tiny.make(folder / "alone", text, dtype=torch.float32, norms=True, **options)  # type: ignore[arg-type]
    described = json.loads((alone / "config.json").read_text())
    kind, vision, more = (Gemma3Config, "siglip_vision_model", {"mm_tokens_per_image": 4}) if family == "gemma3" else (Mistral3Config, "pixtral", {})
    config = kind(text_config=described, vision_config=CONFIG_MAPPING[vision](**WIDTHS).to_dict(), tie_word_embeddings=described["tie_word_embeddings"], **more)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    own = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32)
    whole.model.language_model.load_state_dict(own.model.state_dict())
    if not described["tie_word_embeddings"]:
        whole.lm_head.load_state_dict(own.lm_head.state_dict())
    tiny.tokenizer().save_pretrained(folder / "whole")
    whole.save_pretrained(folder / "whole")
    return folder / "whole"


def rename(folder: Path, new: bool) -> None:
    """Tensors as newer (`model.language_model.layers`) or older files have them (`language_model.model.layers`)."""
    tensors = load_file(folder / "model.safetensors")
    pairs = [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal", "model.multi_modal"),
    ]
    renamed = {}
    for name, tensor in tensors.items():
        for old, newer in pairs:
            was, is_now = (old, newer) if new else (newer, old)
            if name.startswith(was):
                name = is_now + name.removeprefix(was)
                break
        renamed[name] = tensor
    assert any(n.startswith("model.language_model." if new else "language_model.model.") for n in renamed)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("new", [True, False], ids=["newer names", "older names"])
def test_on_texts_it_is_what_the_whole_is(tmp_path: Path, family: str, new: bool) -> None:
    folder = multimodal(tmp_path, family)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rename(folder, new)
    model = open_model(str(folder))
    assert (model.whole, model.config.model_type, model.spec is None) == (family, TEXTS[family][0], False)
    assert not [n for n in model.weights.names() if "vision" in n or "modal" in n or "language_model" in n]
    tokens = list(range(5, 60))
    with torch.no_grad():
        want = whole(input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long)).logits[0]
    llm = LLM(model)
    assert llm.runner.spec.max_positions == 256
    torch.testing.assert_close(torch.cat(list(llm.score([tokens]))), want[:-1], rtol=0, atol=1e-4)
    (out,) = llm.generate([tokens], SamplingParams(max_tokens=12, ignore_eos=True))
    with torch.no_grad():
        greedy = whole.generate(
            input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
    assert out.token_ids == greedy[0, len(tokens) :].tolist()
    found = inspect(folder)
    assert (found["family"], found["whole"], found["runtime"]["runs"]) == (TEXTS[family][0], family, True)


@pytest.mark.parametrize("family", TEXTS)
def test_a_run_leaves_its_language_model_and_says_so(tmp_path: Path, family: str) -> None:
    folder = multimodal(tmp_path, family)
    (tmp_path / "text.txt").write_text("the mill grinds wheat for every village until the storm, and nearly the same day " * 40)
    recipe = {"version": 1, "model": {"source": str(folder)}, "quantize": {"method": "rtn", "scheme": "int8-g32-sym"}, "export": [{"format": "gguf"}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"evaluate": {"text": "text.txt", "window": 64}, "run": {"threads": 1}}))
    results = qforge.quantize(qforge.load_recipe(tmp_path / "recipe.yaml"), out=tmp_path / "out")
    assert any(f"'{family}'" in w and "left out" in w for w in results.warnings)
    assert all(e.lossless for e in results.exports)
    assert results.evaluation is not None
    assert results.evaluation.kl_mean < 0.01
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32)
    assert loaded.config.model_type == TEXTS[family][0]
    assert open_model(str(tmp_path / "out" / "model")).whole is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5.23
@pytest.mark.parametrize("pattern", ["q_proj", r".*language_model\.layers\.1\.self_attn\.q_proj"])
def test_an_adapter_of_the_whole_is_merged(tmp_path: Path, pattern: str) -> None:
    folder = multimodal(tmp_path, "gemma3")
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    only_texts = "." in pattern  # else siglip's linears of the same name have adapters, too
    targets = r".*language_model.*\.(q_proj|down_proj)" if only_texts else ["q_proj", "down_proj"]
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=targets, alpha_pattern={pattern: 24}, rank_pattern={pattern: 2})
    trained = get_peft_model(whole, settings)
    for name, p in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.2)
    trained.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([list(range(5, 40))])
    with torch.no_grad():
        want = trained.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    merged = with_adapters(open_model(str(folder)), [(str(tmp_path / "adapter"), 1.0)])
    assert [n for n in merged.adapters[0].notes if "other than text" in n] == [] if only_texts else len(merged.adapters[0].notes) == 1
    torch.testing.assert_close(torch.cat(list(LLM(merged).score(tokens.tolist()))), want[:-1], rtol=0, atol=2e-4)


def test_what_is_said_of_the_whole_wins(tmp_path: Path) -> None:
    folder = multimodal(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    for outer, inner, want in (([1, 7], 3, [1, 7]), (None, [3, 4], [3, 4])):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": outer, "text_config": config["text_config"] | {"eos_token_id": inner}}))
        assert open_model(str(folder)).config.eos_token_id == want


def test_a_head_is_tied_where_the_whole_ties_it(tmp_path: Path) -> None:
    """Mistral 3's config ties where it does not say; its text_config does not."""
    folder = multimodal(tmp_path, "mistral3")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not open_model(str(folder)).config.tie_word_embeddings  # a head of its own is stored
    save_file({n: t for n, t in tensors.items() if "lm_head" not in n}, folder / "model.safetensors", metadata={"format": "pt"})
    assert open_model(str(folder)).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "Gemma3ForSequenceClassification.*no generative model"),
        ({"text_config": None}, "no text_config"),
        ({"text_config": {}}, "no text_config"),
        ({"text_config": {"model_type": "llama"}}, "is a 'llama'"),
        ({"eos_token_id": "x"}, "not a valid config"),
        ({"text_config": {"model_type": "gemma3_text", "quantization_config": {"quant_method": "fp8"}}}, "quantized multimodal checkpoint"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized multimodal checkpoint"),
        ({"quantization": {"group_size": 32, "bits": 4}}, "quantized multimodal checkpoint"),
    ],
)
def test_descriptions_that_are_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    folder = multimodal(tmp_path, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=says):
        open_model(str(folder))


def test_an_adapter_with_two_names_for_one_module_is_refused(tmp_path: Path) -> None:
    folder = multimodal(tmp_path, "gemma3")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    halves = {}
    for whole in ("model.language_model.", "language_model.model."):
        module = f"base_model.model.{whole}layers.0.self_attn.q_proj"
        halves |= {f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2)}
    save_file(halves, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="calls one module"):
        with_adapters(open_model(str(folder)), [(str(tmp_path / "adapter"), 1.0)])


def test_tensors_of_no_language_model_or_two_are_refused(tmp_path: Path) -> None:
    folder = multimodal(tmp_path, "gemma3")
    tensors = load_file(folder / "model.safetensors")
    named = "model.language_model.norm.weight" if "model.language_model.norm.weight" in tensors else "language_model.model.norm.weight"
    other = {"model.language_model.norm.weight": "language_model.model.norm.weight"}.get(named, "model.language_model.norm.weight")
    save_file(tensors | {other: tensors[named].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="are one tensor of the language model"):
        open_model(str(folder))
    save_file({n: t for n, t in tensors.items() if n != named}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors .* model\.norm\.weight"):
        open_model(str(folder))
    save_file({n: t for n, t in tensors.items() if "vision" in n}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="hold nothing of a language model"):
        open_model(str(folder))
