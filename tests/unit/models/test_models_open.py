"""open_model: what a directory gives, in which dtype, and one clear refusal for everything that is no decoder-only text model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from qforge.errors import MissingCapabilityError, ModelError
from qforge.export.inspection import inspect
from qforge.models import hub
from qforge.models.assets import end_ids
from qforge.models.model import open_model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "phi3", "olmo2", "stablelm"])
def test_tensors_equal_those_that_transformers_loads(tmp_path: Path, family: str) -> None:
    folder = tiny.make(tmp_path / family, family, layers=1)
    model = open_model(str(folder))
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert set(want) - set(model.weights.names()) <= {"lm_head.weight"}
    for name in model.weights.names():
        assert torch.equal(model.weights.read(name), want[name])
        assert model.weights.info(name).shape == tuple(want[name].shape)
    assert (model.spec is None) == (family in ("gpt2", "stablelm"))
    assert not model.schemes
    assert model.tokenizer().decode(model.tokenizer().encode("the mill")) == "the mill"


def test_dtype_is_the_configs_or_the_one_asked_for_or_that_of_the_tensors(copy: Path) -> None:
    assert open_model(str(copy)).dtype == torch.bfloat16
    asked = open_model(str(copy), dtype="float32")
    assert asked.weights.read("model.norm.weight").dtype == asked.weights.info("model.norm.weight").dtype == asked.config.dtype == torch.float32
    edit(copy, dtype=..., torch_dtype=...)
    rewrite(copy, {k: v.half() for k, v in stored(copy).items()})
    assert open_model(str(copy)).dtype == torch.float16
    with pytest.raises(ModelError, match="use auto, float32"):
        open_model(str(copy), dtype="int4")


def test_relative_paths_start_at_the_given_folder_and_an_output_folder_is_its_model(copy: Path) -> None:
    out = copy.parent / "out"
    out.mkdir()
    copy.rename(out / "model")
    assert open_model("out", folder=out.parent).assets == out / "model"


def test_fingerprint_follows_weights_config_dtype_and_tokenizer(copy: Path) -> None:
    seen = [open_model(str(copy)).fingerprint(), open_model(str(copy), dtype="float32").fingerprint()]
    tensors = stored(copy)
    rewrite(copy, tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1})
    seen.append(open_model(str(copy)).fingerprint())
    edit(copy, rms_norm_eps=0.5)
    seen.append(open_model(str(copy)).fingerprint())
    assert open_model(str(copy)).fingerprint() == seen[-1]
    with open(copy / "tokenizer.json", "a") as f:
        f.write(" ")
    seen.append(open_model(str(copy)).fingerprint())
    assert len(set(seen)) == 5


def test_a_stored_head_beside_a_tied_embedding(copy: Path) -> None:
    tensors = stored(copy)
    embedding = tensors["model.embed_tokens.weight"]
    rewrite(copy, tensors | {"lm_head.weight": embedding.clone()})
    same = open_model(str(copy))
    assert same.config.tie_word_embeddings
    assert "lm_head.weight" not in same.weights.names()
    rewrite(copy, tensors | {"lm_head.weight": embedding * 2})
    other = open_model(str(copy))
    assert not other.config.tie_word_embeddings
    assert other.spec is not None
    assert not other.spec.tied_head
    assert torch.equal(other.weights.read("lm_head.weight"), embedding * 2)
    rewrite(copy, {k: v for k, v in tensors.items() if "embed" not in k} | {"lm_head.weight": embedding})
    assert torch.equal(open_model(str(copy)).weights.read("model.embed_tokens.weight"), embedding)


def test_rotary_buffers_are_ignored_and_names_without_their_prefix_are_found(copy: Path) -> None:
    tensors = {k.removeprefix("model."): v for k, v in stored(copy).items()}
    rewrite(copy, tensors | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    model = open_model(str(copy))
    assert torch.equal(model.weights.read("model.norm.weight"), tensors["norm.weight"])
    assert not any("inv_freq" in n for n in model.weights.names())


def test_names_that_transformers_renames_when_it_loads_are_found(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", "gpt_neox", layers=1, tied=False)
    assert "embed_out.weight" in stored(folder)
    model = open_model(str(folder))
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert model.weights.names() == list(want)
    assert all(torch.equal(model.weights.read(name), tensor) for name, tensor in want.items())


def test_what_is_stored_instead_of_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, {n.replace("1.mlp.up_proj", "1.mlp.raise"): t for n, t in stored(copy).items()})
    with pytest.raises(ModelError, match=r"lack 1 tensors .*1\.mlp\.up_proj\.weight; of those .* does not know model\.layers\.1\.mlp\.raise\.weight"):
        open_model(str(copy))


def test_tensors_that_do_not_fit_the_config_are_named(copy: Path) -> None:
    tensors = stored(copy)
    rewrite(copy, {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"})
    with pytest.raises(ModelError, match=r"lack 1 tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(str(copy))
    rewrite(copy, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(ModelError, match=r"does not have: model\.layers\.0\.self_attn\.q_proj\.bias"):
        open_model(str(copy))
    rewrite(copy, tensors | {"model.norm.weight": torch.ones(65)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[65\] instead of \[64\]"):
        open_model(str(copy))
    edit(copy, num_hidden_layers=10**9, layer_types=...)
    with pytest.raises(ModelError, match="1000000000 layers"):
        open_model(str(copy))


def write_config(folder: Path, config: dict[str, Any] | str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ({}, "no model_type"),
        ({"model_type": "llama9"}, "does not know the family 'llama9'"),
        ({"model_type": "custom", "auto_map": {"AutoConfig": "c.C"}}, "trust_remote_code"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "whisper"}, "encoder-decoder"),
        ({"model_type": "llava"}, "multimodal"),
        ({"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]}, "multimodal"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a causal language model"),
        ({"model_type": "vit"}, "not a causal language model"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "llama", "hidden_size": "wide"}, "not a valid config"),
        ({"model_type": "llama", "quantization_config": 3}, "should be an object"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as e:
        open_model(str(write_config(tmp_path / "m", config)))
    assert "\n" not in str(e.value)


def test_incomplete_folders_are_refused(copy: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (copy / name).unlink()
        with pytest.raises(ModelError, match="no tokenizer" if name == "tokenizer.json" else "no config.json"):
            open_model(str(copy))
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapters:"):
        open_model(str(copy))


@pytest.mark.parametrize("method", ["eetq", "hqq", "fp8", "mxfp4"])
def test_quantization_that_is_not_read_is_named(copy: Path, method: str) -> None:
    edit(copy, quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"quantized with {method} is not readable yet"):
        open_model(str(copy))


@pytest.mark.parametrize(("config", "message"), [({"load_in_8bit": True}, "reads 4-bit nf4"), ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "hold no weight.quant_state")])
def test_other_bitsandbytes_checkpoints_are_refused(copy: Path, config: dict[str, object], message: str) -> None:
    edit(copy, quantization_config={"quant_method": "bitsandbytes", **config})
    with pytest.raises(ModelError, match=message):
        open_model(str(copy))


@pytest.mark.parametrize("source", ["/x/nowhere", "./nowhere", "a/b/c", "x.gguf", "", "..", "has space/x", "org/../x"])
def test_a_path_that_is_not_there_is_bad_input(tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelError):
        open_model(source, folder=tmp_path)


def test_a_hub_id_without_a_network_is_a_missing_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingCapabilityError, match="cannot be reached"):
        open_model("some-org/some-model", folder=tmp_path)
    with pytest.raises(ModelError, match="is no path here"):
        open_model("nowhere", folder=tmp_path)
    (tmp_path / "some-org").mkdir()
    with pytest.raises(ModelError, match="there is no model at"):
        open_model("some-org/some-model", folder=tmp_path)


def test_a_token_with_an_id_beyond_every_vocabulary_is_refused(copy: Path) -> None:
    """Its library would walk all ids up to that one, and end the process where memory for them ends."""
    file = copy / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"]["mill"] = 2**32 - 1
    file.write_text(json.dumps(words))
    with pytest.raises(ModelError, match=r"tokenizer\.json gives a token the id 4294967295; ids go up to 16777215"):
        open_model(str(copy)).tokenizer()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}},
        ),
        ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}),
    ],
)
def test_a_tokenizer_whose_parts_fail_when_they_run_is_one_message(copy: Path, part: str, value: object) -> None:
    """Panics of Rust code among them, which are no Exception."""
    file = copy / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be (loaded|used)"):
        open_model(str(copy)).tokenizer()
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be (loaded|used)"):
        inspect(copy, check=True)


@pytest.mark.parametrize("eps", [math.nan, math.inf, -1.0])
def test_a_norm_that_divides_by_nothing_is_refused(copy: Path, eps: float) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": eps}))
    with pytest.raises(ModelError, match="rms_norm_eps is"):
        open_model(str(copy))


def test_an_index_that_is_a_folder_is_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").mkdir()
    with pytest.raises(ModelError, match="is not an index of safetensors files"):
        open_model(str(copy))


@pytest.mark.parametrize("found", ["x", [0, "x"], [[0]], {"a": 1}, 0.5, True], ids=str)
def test_end_tokens_that_are_no_ids_are_refused(copy: Path, found: object) -> None:
    model = open_model(str(copy))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(ModelError, match="where a token's id or a list of them is needed"):
        end_ids(copy, model.config)


def test_a_longest_text_that_is_no_number_is_named(copy: Path) -> None:
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "512"}))
    with pytest.raises(ModelError, match=r"model_max_length in tokenizer_config\.json is '512'"):
        open_model(str(copy)).tokenizer()


def test_a_home_folder_of_nobody_is_a_path_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="there is no model at '~nosuchuser/x'"):
        open_model("~nosuchuser/x")


def test_of_a_hubs_folders_named_chat_templates_alone_are_downloaded():
    files = ["config.json", "model.safetensors", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "onnx/config.json", "original/tokenizer.model", "sub/x.py"]
    found = list(filter_repo_objects(files, allow_patterns=[*hub._WANTED, "*.py"], ignore_patterns=hub._UNWANTED))
    assert found == files[:4]


@pytest.mark.parametrize(("words", "said"), [((), "ValueError"), (("first\nlast",), "last")])
def test_what_transformers_refuses_without_words_is_told_by_its_type(copy: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError(*words)

    with monkeypatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_config", fail)
        with pytest.raises(ModelError, match=f"from this config: {said}$"):
            open_model(str(copy))
    monkeypatch.setattr(LlamaConfig, "from_dict", fail)
    with pytest.raises(ModelError, match=f"not a valid config of the family 'llama': {said}$"):
        open_model(str(copy))
