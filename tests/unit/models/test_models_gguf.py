"""GGUF: every tensor and the config equal what transformers' own reader gives; hostile and truncated files are refused quickly."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qforge import numerics, pipeline
from qforge.engines import llama_cpp
from qforge.errors import ModelError
from qforge.models import gguf_source, names
from qforge.models.gguf_config import gguf_config
from qforge.models.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from qforge.models.locate import model_folder
from qforge.models.model import open_model
from qforge.models.spec import model_spec
from qforge.models.tying import shared_table
from qforge.stages.exported import foreign
from qforge.types import ExpertsSpec

BLOCKS = {
    "attn_q": "Q4_0",
    "attn_k": "Q8_0",
    "attn_v": "Q5_0",
    "attn_qkv": "Q5_0",
    "attn_output": "Q4_1",
    "ffn_gate": "Q5_1",
    "ffn_up": "F16",
    "ffn_down": "BF16",
    "token_embd": "Q8_0",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, base: Path, *, extra: Callable[[gguf.GGUFWriter], None] = lambda w: None, only_f32: bool = False, arch: str | None = None) -> Path:
    """The tiny model `base` as a GGUF file with mixed block types, written with the gguf package alone."""
    config = AutoConfig.from_pretrained(base)
    arch = arch or {"gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2"}.get(config.model_type, config.model_type)
    w = gguf.GGUFWriter(path, arch)
    w.add_name("tiny")
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // config.num_attention_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type in ("gemma3_text", "olmo3"):
        w.add_sliding_window(config.sliding_window)
    if arch == "glm4":
        w.add_rope_dimension_count(config.head_dim // 2)
    if arch == "granite":
        w.add_attention_scale(config.attention_multiplier)
        w.add_embedding_scale(config.embedding_multiplier)
        w.add_residual_scale(config.residual_multiplier)
        w.add_logit_scale(config.logits_scaling)
    w.add_rope_freq_base(12345.0)
    add_tokenizer(w, base)
    extra(w)
    state = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    for ours, theirs in names.gguf_names(config).items():
        if ours in state and not (ours == "lm_head.weight" and config.tie_word_embeddings):
            value = state[ours]
            if arch in ("llama", "smollm3", "granite") and ("q_proj" in ours or "k_proj" in ours):
                heads = config.num_attention_heads if "q_proj" in ours else config.num_key_value_heads
                value = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            if arch in ("gemma", "gemma3") and "norm" in ours:
                value = value + 1
            kind = "F32" if only_f32 else BLOCKS.get(theirs.split(".")[-2], "F32")
            w.add_tensor(theirs, gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType[kind]), raw_dtype=gguf.GGMLQuantizationType[kind])
    for ours, value in state.items():
        if ours.endswith("experts.gate_up_proj"):
            stacks = dict(zip(("gate", "up"), value.chunk(2, 1), strict=True))
        elif ours.endswith("experts.down_proj"):
            stacks = {"down": value}
        else:
            continue
        block = f"blk.{ours.split('.')[2]}.ffn_"
        for part, stack in stacks.items():
            kind = gguf.GGMLQuantizationType["F32" if only_f32 else {"gate": "Q5_1", "up": "Q8_0", "down": "Q4_0"}[part]]
            w.add_tensor(f"{block}{part}_exps.weight", gguf.quants.quantize(stack.contiguous().numpy(), kind), raw_dtype=kind)
        if config.model_type == "mixtral" and "gate_up" in ours:  # whose router checkpoints call otherwise than the module
            w.add_tensor(f"{block}gate_inp.weight", state[ours.replace("experts.gate_up_proj", "gate.weight")].numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def add_tokenizer(w: gguf.GGUFWriter, base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(vocabulary)
    w.add_token_types([3 if t in tokenizer.all_special_tokens or t.startswith("<|") else 1 for t in vocabulary])
    w.add_token_merges([" ".join(m) for m in json.loads((base / "tokenizer.json").read_text())["model"]["merges"]])
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    w.add_chat_template(tokenizer.chat_template)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gguf")
    untied = {"llama": True, "qwen2": False}
    plain = {f: tiny.make(root / f, f, seed=4, layers=2, tied=untied.get(f, True)) for f in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma")}
    scales = {"embedding_multiplier": 6.0, "attention_multiplier": 0.25, "residual_multiplier": 0.375, "logits_scaling": 5.0, "mlp_bias": True}
    more = {
        "smollm3": {"layers": 5}, "granite": {"layers": 2, **scales}, "seed_oss": {"layers": 2}, "olmo2": {"layers": 2, "tied": False},
        "exaone4": {"layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2},
        "olmo3": {"layers": 5, "sliding_window": 32, "tied": False}, "phi3": {"layers": 2}, "glm4": {"layers": 2}, "ernie4_5": {"layers": 2},
    }  # fmt: skip
    return plain | {f: tiny.make(root / f, f, seed=4, norms=True, **options) for f, options in more.items()}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_tensors_equal_transformers_reader(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    path = write(tmp_path / "m.gguf", bases[family])
    model = open_model("m.gguf", folder=tmp_path, dtype="float32")
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    config.head_dim = model.config.head_dim  # transformers does not read it for the qwen family
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=config, dtype=torch.float32).state_dict()
    assert set(theirs) - set(model.weights.names()) <= {"lm_head.weight"}
    for name in model.weights.names():
        assert torch.equal(model.weights.read(name), theirs[name]), name
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size", "tie_word_embeddings"):
        assert getattr(model.config, key) == getattr(config, key), key


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_read_out_of_stacks(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    """As another program stacks them: in fp32 the original's values, in blocks those that the gguf package makes of the stack; the integers of each expert are its own."""
    experts = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}}[family]
    base = tiny.make(tmp_path / "base", family, layers=2, num_experts_per_tok=2, **experts)
    for only_f32 in (True, False):
        path = write(
            tmp_path / f"{only_f32}.gguf", base, only_f32=only_f32, extra=lambda w: (w.add_expert_count(4), w.add_expert_used_count(2), w.add_expert_feed_forward_length(32))
        )
        model = open_model(str(path), dtype="float32")
        assert model.config.model_type == family
        assert model.spec is not None
        assert model.spec.experts == ExpertsSpec(4, 32 if family == "qwen3_moe" else 128, 2, True, (True, True))
        stored = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(path).tensors if "_exps" in t.name}
        seen = 0
        for name in model.weights.names():
            if ".experts." not in name:
                continue
            layer, (expert, part) = name.split(".")[2], name.split(".")[-3:-1]
            stack = stored[f"blk.{layer}.ffn_{ {'w1': 'gate', 'w3': 'up', 'w2': 'down'}.get(part, part.removesuffix('_proj')) }_exps.weight"]
            assert torch.equal(model.weights.read(name), stack[int(expert)]), name
            if (module := name.removesuffix(".weight")) in model.schemes:
                assert torch.equal(numerics.dequantize(model.linear(module)), stack[int(expert)])
                seen += 1
        assert seen == (0 if only_f32 else 2 * 4 * 2)  # Q8_0 and Q4_0 are integers


def test_a_folder_with_one_file_means_that_file(bases: dict[str, Path], tmp_path: Path) -> None:
    """An importance matrix beside it is no model; of several files none is guessed; a model directory or a run's folder means what it did."""
    folder = tmp_path / "exports"
    folder.mkdir()
    file = write(folder / "m.gguf", bases["llama"])
    shutil.copy(file, folder / "imatrix.gguf")
    assert model_folder(folder) == file
    assert open_model("exports", folder=tmp_path).fingerprint() == open_model(str(file)).fingerprint()
    assert pipeline._open_exactly(folder).dtype == torch.float32 != open_model(str(folder)).dtype
    if llama_cpp.missing() is None:
        assert foreign("llama.cpp", folder).name == foreign("llama.cpp", file).name
    shutil.copy(file, folder / "n.gguf")
    with pytest.raises(ModelError, match=r"name the file itself, for example .*\.gguf"):
        open_model(str(folder))
    shutil.copytree(bases["qwen2"], folder / "model")
    assert open_model(str(folder)).config.model_type == "qwen2"


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("gemma3_text", True)])
def test_a_head_that_is_the_embedding_is_quantized_as_that_is(bases: dict[str, Path], tmp_path: Path, family: str, tied: bool) -> None:
    """A tied file has no tensor for the head; the codes of the embedding are its, and both share one table."""
    write(tmp_path / "m.gguf", bases[family])
    model = open_model("m.gguf", folder=tmp_path)
    assert ("lm_head" in model.schemes) == tied
    assert (shared_table(model, model.schemes) == "model.embed_tokens") == tied
    if tied:
        assert str(model.schemes["lm_head"]) == "int8-g32-sym@f16"
        stored = model.weights.read("model.embed_tokens.weight")  # in the model's type, as what is made of the model holds it
        assert stored.dtype == torch.float16
        assert torch.equal(numerics.dequantize(model.linear("lm_head")).half(), stored)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "gemma", "smollm3", "granite", "phi3", "glm4", "ernie4_5", "seed_oss", "exaone4", "olmo2", "olmo3"])
def test_an_f32_file_computes_what_its_model_computes(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    write(tmp_path / "m.gguf", bases[family], only_f32=True)
    model = open_model("m.gguf", folder=tmp_path)
    assert model.dtype == torch.float32
    reference = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32).eval()
    if family == "gemma3_text":
        reference.config.query_pre_attn_scalar = model.config.query_pre_attn_scalar
    for name in model.weights.names():
        torch.testing.assert_close(model.weights.read(name), reference.state_dict()[name], atol=2e-7, rtol=0)
    rope = model.config.rope_parameters.get("full_attention", model.config.rope_parameters)
    assert rope["rope_theta"] == 12345.0
    assert model.spec is not None
    assert model.spec.head_dim == 16
    assert model.spec.attention_bias == (family in ("qwen2", "seed_oss", "glm4"))
    source = open_model(str(bases[family])).spec
    assert source is not None
    ropes = tuple(r if r.kind == "none" else replace(r, theta=12345.0) for r in source.layer_ropes)
    if family != "gemma3_text":  # whose file says less than its config
        assert model.spec == replace(source, layer_ropes=ropes, norm_eps=model.spec.norm_eps)
        assert model.spec.norm_eps == pytest.approx(source.norm_eps)
    text = "The miller, 12 sacks.\n\nEnd"
    assert model.tokenizer().encode(text) == AutoTokenizer.from_pretrained(bases[family]).encode(text)
    assert model.tokenizer().get_vocab() == AutoTokenizer.from_pretrained(bases[family]).get_vocab()
    assert model.tokenizer().chat_template == AutoTokenizer.from_pretrained(bases[family]).chat_template


def phi3_file(bases: dict[str, Path], path: Path, *, rotated: int = 12, missing: str = "") -> GgufHeader:
    """As llama.cpp's converter writes Phi 4 mini, sizes aside: the context whole, the original one beside it, the amplitude as a number."""

    def extra(w: gguf.GGUFWriter) -> None:
        w.add_rope_dimension_count(rotated)
        w.add_rope_scaling_orig_ctx_len(128)
        w.add_rope_scaling_attn_factors(1.19)
        w.add_sliding_window(200)
        for name, factor in (("long", 3.0), ("short", 1.5)):
            if name != missing:
                w.add_tensor(f"rope_factors_{name}.weight", np.linspace(1, factor, 6, dtype=np.float32))

    return read_gguf_header(write(path, bases["phi3"], extra=extra, only_f32=True))


def test_phi3s_factors_and_widths_are_read(bases: dict[str, Path], tmp_path: Path) -> None:
    phi3_file(bases, tmp_path / "m.gguf")
    model, source = open_model("m.gguf", folder=tmp_path), open_model(str(bases["phi3"]))
    assert model.spec is not None
    rope = model.spec.layer_ropes[0]
    assert (rope.kind, rope.rotated, rope.theta) == ("longrope", 12, 12345.0)
    assert rope.amplitude == pytest.approx(1.19)
    np.testing.assert_allclose(rope.factors, np.linspace(1, 1.5, 6), rtol=1e-6)
    np.testing.assert_allclose(model.config.rope_parameters["long_factor"], np.linspace(1, 3, 6), rtol=1e-6)
    assert (model.config.max_position_embeddings, model.config.original_max_position_embeddings, model.spec.max_positions) == (256, 128, 128)
    assert model.spec.layer_windows == (200, 200)
    assert set(model.weights.names()) == set(source.weights.names())
    assert all(torch.equal(model.weights.read(name), source.weights.read(name)) for name in source.weights.names())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope.scaling.factor": 2.0}, "divided by rope_factors_long.weight and something else"),
        ({"rope.scaling.attn_factor": -1.0}, "-1.0 for phi3.rope.scaling.attn_factor"),
        ({"rope.scaling.original_context_length": 1}, "where a number of tokens is needed"),
        ({"rope.scaling.original_context_length": "x"}, "for phi3.rope.scaling.original_context_length"),
        ({"rope.dimension_count": 18}, "make no valid 'phi3' config"),
        ({"rope.dimension_count": 10}, "make no valid 'phi3' config"),
        ({"attention.sliding_window": -3}, "-3 for phi3.attention.sliding_window"),
    ],
)
def test_phi3_files_that_say_something_else_are_refused(bases: dict[str, Path], tmp_path: Path, said: dict[str, Any], message: str) -> None:
    header = phi3_file(bases, tmp_path / "m.gguf")
    header.metadata.update({f"phi3.{key}": value for key, value in said.items()})
    with pytest.raises(ModelError, match=message):
        model_spec(gguf_config(header))


def test_factors_of_rope_are_whole_and_phi3s_own(bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"something else than rope_factors_long\.weight and rope_factors_short\.weight"):
        gguf_config(phi3_file(bases, tmp_path / "m.gguf", missing="short"))
    write(tmp_path / "n.gguf", bases["llama"], extra=lambda w: w.add_tensor("rope_factors_short.weight", np.ones(8, dtype=np.float32)))
    with pytest.raises(ModelError, match="rope_factors_short"):
        open_model("n.gguf", folder=tmp_path)
    write(tmp_path / "p.gguf", bases["phi3"], extra=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32)))
    with pytest.raises(ModelError, match="rope_freqs"):
        open_model("p.gguf", folder=tmp_path)
    header = read_gguf_header(write(tmp_path / "o.gguf", bases["phi3"]))
    header.metadata["phi3.rope.scaling.attn_factor"] = 1.19
    with pytest.raises(ModelError, match="attn_factor, which is available with yarn"):
        gguf_config(header)


def test_what_only_some_files_say_is_read(bases: dict[str, Path], tmp_path: Path) -> None:
    olmo3, exaone4 = (read_gguf_header(write(tmp_path / f"{f}.gguf", bases[f])) for f in ("olmo3", "exaone4"))
    assert gguf_config(olmo3).layer_types == ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"]
    olmo3.metadata.update({"olmo2.rope.freq_base_swa": 777.0, "olmo2.attention.sliding_window_pattern": [False, True, True, True, True]})
    config = gguf_config(olmo3)
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 777.0}
    assert config.rope_parameters["full_attention"]["rope_theta"] == 12345.0
    assert config.layer_types == ["full_attention"] + ["sliding_attention"] * 4
    exaone4.metadata["exaone4.attention.sliding_window"] = 32  # of the size without windows
    assert gguf_config(exaone4).sliding_window is None
    biased = tiny.make(tmp_path / "ernie", "ernie4_5", layers=1, use_bias=True)
    model = open_model(str(write(tmp_path / "ernie.gguf", biased, only_f32=True)))
    assert model.config.use_bias
    assert model.spec is not None
    assert (model.spec.attention_bias, model.spec.output_bias, model.spec.mlp_bias) == (True, True, True)


def test_a_share_of_a_head_that_is_no_binary_fraction_is_read(bases: dict[str, Path], tmp_path: Path) -> None:
    """transformers makes a whole number of it by cutting off what is behind the point, so that some quotients are too small."""
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["glm4"]))
    short = 0
    for width in range(16, 130, 2):
        for rotated in range(2, width, 2):
            header.metadata.update({"glm4.attention.key_length": width, "glm4.rope.dimension_count": rotated})
            share = gguf_config(header).rope_parameters["partial_rotary_factor"]
            assert int(width * share) == rotated
            short += int(width * (rotated / width)) < rotated
    assert short


def test_rotary_factors_of_another_type_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", bases["llama"], extra=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float16)))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is of type F16, where F32 is needed"):
        open_model("m.gguf", folder=tmp_path)


def test_multipliers_that_a_granite_file_leaves_out_are_those_of_llama_cpp(bases: dict[str, Path], tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["granite"]))
    header.metadata["granite.embedding_scale"] = 0.0
    for key in ("attention.scale", "residual_scale"):
        del header.metadata[f"granite.{key}"]
    config = gguf_config(header)
    assert (config.attention_multiplier, config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (0.25, 1.0, 1.0, 5.0)
    del header.metadata["granite.logit_scale"]
    with pytest.raises(ModelError, match=r"None for granite\.logit_scale, where one positive number"):
        gguf_config(header)
    header.metadata.update({"granite.logit_scale": 5.0, "granite.rope.scaling.finetuned": False})
    with pytest.raises(ModelError, match="no rotary embedding"):
        gguf_config(header)


def test_templates_that_have_names_come_along(bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_names(w: gguf.GGUFWriter, base: Path) -> None:
        add(w, base)
        w.add_string("tokenizer.chat_template.tool_use", "{{ messages[0]['content'] }} with tools")
        w.add_string("tokenizer.chat_template.../out", "no name of a file")

    add = add_tokenizer
    monkeypatch.setattr(sys.modules[__name__], "add_tokenizer", with_names)
    write(tmp_path / "m.gguf", bases["llama"])
    model = open_model("m.gguf", folder=tmp_path)
    templates = model.tokenizer().chat_template
    assert set(templates) == {"default", "tool_use"}
    asked = model.tokenizer().apply_chat_template([{"role": "user", "content": "grind"}], chat_template="tool_use", tokenize=False)
    assert asked == "grind with tools"


def test_a_quantized_file_is_float16_and_assets_are_made_once(bases: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", bases["llama"])
    model = open_model("m.gguf", folder=tmp_path)
    assert model.dtype == torch.float16
    assert model.weights.read("model.norm.weight").dtype == torch.float16
    assert sorted(p.name for p in model.assets.iterdir()) == ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    stamp = (model.assets / "tokenizer.json").stat().st_mtime_ns
    again = open_model("m.gguf", folder=tmp_path)
    assert (again.assets / "tokenizer.json").stat().st_mtime_ns == stamp
    assert again.fingerprint() == model.fingerprint()


def divisors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """Llama 3.1's frequency scaling as llama.cpp's converter writes it."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        out.append(1 if wavelength < 2048 else factor if wavelength > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(bases: dict[str, Path], tmp_path: Path, factor: float) -> None:
    write(tmp_path / "m.gguf", bases["llama"], extra=lambda w: w.add_tensor("rope_freqs.weight", divisors(16, 12345.0, factor)))
    rope = open_model("m.gguf", folder=tmp_path).config.rope_parameters
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == factor
    write(tmp_path / "n.gguf", bases["llama"], extra=lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32)))
    with pytest.raises(ModelError, match="rotary frequencies"):
        open_model("n.gguf", folder=tmp_path)


def test_rope_scaling_keys_are_read(bases: dict[str, Path], tmp_path: Path) -> None:
    def yarn(w: gguf.GGUFWriter) -> None:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(4.0)
        w.add_rope_scaling_orig_ctx_len(64)

    def linear(w: gguf.GGUFWriter) -> None:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(8.0)

    write(tmp_path / "yarn.gguf", bases["qwen2"], extra=yarn)
    rope = open_model("yarn.gguf", folder=tmp_path).config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 64)
    write(tmp_path / "linear.gguf", bases["gemma3_text"], extra=linear)
    ropes = open_model("linear.gguf", folder=tmp_path).config.rope_parameters
    assert (ropes["full_attention"]["rope_type"], ropes["full_attention"]["factor"]) == ("linear", 8.0)
    assert ropes["sliding_attention"]["rope_type"] == "default"
    write(tmp_path / "long.gguf", bases["llama"], extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(ModelError, match="longrope"):
        open_model("long.gguf", folder=tmp_path)


LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"scaling.factor": 4.0}, LINEAR),
        ({"scale_linear": 4.0}, LINEAR),
        ({"scaling.factor": 4.0, "scale_linear": 2.0}, LINEAR),
        ({"scaling.type": "linear", "scale_linear": 4.0}, LINEAR),
        ({"scaling.factor": 1.0}, PLAIN),
        ({"scaling.factor": 0.0}, PLAIN),
        ({"scaling.type": "linear"}, PLAIN),
        ({"scaling.type": "none", "scaling.factor": 4.0, "scaling.attn_factor": 1.0}, PLAIN),
        ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5}, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
    ],
    ids=str,
)
def test_rope_is_scaled_as_llama_cpp_reads_the_keys(bases: dict[str, Path], tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["llama"]))
    header.metadata.update({f"llama.rope.{key}": value for key, value in said.items()})
    rope = gguf_config(header).rope_parameters
    assert {key: rope[key] for key in ("rope_type", "factor", "attention_factor") if key in rope} == expected


@pytest.mark.parametrize(
    ("family", "said", "message"),
    [
        ("llama", {"scaling.attn_factor": 2.0}, "2.0 for llama.rope.scaling.attn_factor"),
        ("llama", {"scaling.type": "linear", "scaling.factor": 4.0, "scaling.attn_factor": 2.0}, "2.0 for llama.rope.scaling.attn_factor"),
        ("gemma3_text", {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 2.0}, "2.0 for gemma3.rope.scaling.attn_factor"),
        ("llama", {"scaling.factor": -1.0}, "-1.0 for llama.rope.scaling.factor, where one positive number"),
        ("llama", {"scaling.factor": math.nan}, "nan for llama.rope.scaling.factor, where one positive number"),
        ("llama", {"scale_linear": "x"}, "'x' for llama.rope.scale_linear, where one positive number"),
    ],
    ids=str,
)
def test_rope_that_is_scaled_otherwise_is_refused(bases: dict[str, Path], tmp_path: Path, family: str, said: dict[str, Any], message: str) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases[family]))
    header.metadata.update({f"{header.architecture}.rope.{key}": value for key, value in said.items()})
    with pytest.raises(ModelError, match=message):
        gguf_config(header)


def test_two_scalings_of_rope_at_once_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["llama"], extra=lambda w: w.add_tensor("rope_freqs.weight", divisors(16, 12345.0, 8.0))))
    header.metadata["llama.rope.scaling.factor"] = 4.0
    with pytest.raises(ModelError, match="scaled twice"):
        gguf_config(header)


def test_models_that_are_not_read_from_gguf_are_named(bases: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", bases["llama"], arch="mamba")
    with pytest.raises(ModelError, match="'mamba'; qforge reads llama, qwen2, qwen3, qwen3moe, gemma, gemma3"):
        open_model("m.gguf", folder=tmp_path)
    write(tmp_path / "e.gguf", bases["qwen2"], extra=lambda w: w.add_expert_count(8))
    with pytest.raises(ModelError, match="8 experts in a layer; qforge reads up to 4096 of llama and qwen3moe models"):
        open_model("e.gguf", folder=tmp_path)
    write(tmp_path / "s.gguf", bases["llama"], extra=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_model("s.gguf", folder=tmp_path)
    write(tmp_path / "x.gguf", bases["llama"], extra=lambda w: w.add_tensor("blk.0.surprise.weight", np.ones(4, dtype=np.float32)))
    with pytest.raises(ModelError, match=r"blk\.0\.surprise\.weight"):
        open_model("x.gguf", folder=tmp_path)


@pytest.mark.parametrize("value", ["x", math.nan, math.inf, -0.5, [1, 2]], ids=str)
@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"])
def test_metadata_of_another_kind_are_one_message(bases: dict[str, Path], tmp_path: Path, key: str, value: Any) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["llama"]))
    header.metadata[f"llama.{key}"] = value
    with pytest.raises(ModelError, match=re.escape(f"llama.{key}, where one positive {'number' if key == 'rope.freq_base' else 'whole number'} is needed")):
        gguf_config(header)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", 2**31, "2147483648 blocks, and it holds tensors of"),
        ("split.count", "x", "one of x parts"),
        ("llama.attention.head_count", 0.5, "0.5 for llama.attention.head_count, where one positive whole number"),
        ("tokenizer.ggml.bos_token_id", "x", "'x' for tokenizer.ggml.bos_token_id, where a token's id"),
        ("llama.rope.scaling.type", "x" * 10_000, "rotary scaling of the kind 'xxxxxxxxxxxx...xxxxxxxxxxxxx' is"),
    ],
)
def test_counts_that_the_tensors_do_not_bear_out_are_refused_at_once(bases: dict[str, Path], tmp_path: Path, key: str, value: Any, message: str) -> None:
    header = read_gguf_header(write(tmp_path / "m.gguf", bases["llama"]))
    header.metadata[key] = value
    with pytest.raises(ModelError, match=message):
        gguf_config(header)


def head(num_tensors: int, num_pairs: int, rest: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


ARCH = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
ROOM = bytes(4096)


def row(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGUF", "is no GGUF file"),
        (b"PK\x03\x04" + ROOM, "starts with"),
        (head(2**61, 2**61), "do not fit"),
        (head(2**61, 2**61, ROOM), "do not fit"),
        (head(0, 2**64 - 1, ROOM), "do not fit"),
        (head(0, 0, ROOM), "no general.architecture"),
        (head(0, 0, version=1), "version 1"),
        (head(0, 0, version=3 << 24), "other byte order"),
        (head(0, 1, struct.pack("<Q", 2**62) + ROOM), "needs"),
        (head(0, 1, string(b"k") + struct.pack("<I", 77) + ROOM), "unknown type 77"),
        (head(0, 1, string(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + ROOM), "strings"),
        (head(0, 1, string(b"k") + struct.pack("<IIQ", 9, 6, 2**61) + ROOM), "needs"),
        (head(0, 1, string(b"k") + struct.pack("<IIQ", 9, 9, 1) + ROOM), "unknown type 9"),
        (head(0, 1, string(b"\xff") + ROOM), "not UTF-8"),
        (head(0, 2, ARCH + ARCH + ROOM), "occurs twice"),
        (head(0, 2, ARCH + string(b"general.alignment") + struct.pack("<II", 4, 0) + ROOM), "power of two"),
        (head(1, 1, ARCH + row(b"a", [1] * 5) + ROOM), "5 dimensions"),
        (head(1, 1, ARCH + row(b"a", [2**60, 2**60]) + ROOM), "should end"),
        (head(1, 1, ARCH + row(b"a", [33], kind=2) + ROOM), "whole blocks"),
        (head(1, 1, ARCH + row(b"a", [32], kind=4) + ROOM), "type 4"),
        (head(1, 1, ARCH + row(b"a", [4], offset=2**63) + ROOM), "should end"),
        (head(1, 1, ARCH + row(b"a", [4], offset=3) + ROOM), "aligned"),
        (head(2, 1, ARCH + row(b"a", [64]) + row(b"b", [64], offset=32) + ROOM), "overlap"),
        (head(2, 1, ARCH + row(b"a", [4]) + row(b"a", [4], offset=32) + ROOM), "occurs twice"),
    ],
)
def test_hostile_headers_are_refused_at_once(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "h.gguf"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(ModelError, match=message) as e:
        open_model(str(path))
    assert time.process_time() - start < 1
    assert str(path) in str(e.value)


def test_any_cut_is_found(bases: dict[str, Path], tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", bases["llama"])
    whole = path.read_bytes()
    data = min(t.start for t in read_gguf_header(path).tensors.values())
    for length in [*range(0, data, 997), data, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_model(str(path))


def test_a_special_token_that_there_is_not_is_named(bases: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", bases["llama"])
    key, whole = b"tokenizer.ggml.eos_token_id", (tmp_path / "m.gguf").read_bytes()
    value = whole.index(key) + len(key) + 4  # behind its type
    (tmp_path / "m.gguf").write_bytes(whole[:value] + (1 << 31).to_bytes(4, "little") + whole[value + 4 :])
    with pytest.raises(ModelError, match=r"cannot be read \(tokenizer.ggml.eos_token_id is 2147483648, and there are 384 tokens\)"):
        open_model("m.gguf", folder=tmp_path)


def test_scales_that_overflow_are_values_and_no_warning(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes([254] + [0x77] * 16))
    tensor = GgufTensor("w", (1, 32), gguf.GGMLQuantizationType.MXFP4, 0, 17)
    with pytest.warns(RuntimeWarning, match="overflow"):
        gguf.quants.dequantize(np.fromfile(tmp_path / "m.gguf", np.uint8).reshape(1, -1), tensor.type)
    found = gguf_source._read(GgufHeader(tmp_path / "m.gguf", {}, {"w": tensor}, ""), tensor)
    assert found.isinf().all()


def test_stacks_of_other_counts_are_refused_at_once(tmp_path: Path) -> None:
    """A tensor of two million matrices of one number is no two million tensors."""
    base = tiny.make(tmp_path / "base", "mixtral", layers=1, num_local_experts=4, num_experts_per_tok=2)

    def counts(w: gguf.GGUFWriter) -> None:
        w.add_expert_count(4)
        w.add_expert_used_count(2)

    path = write(tmp_path / "m.gguf", base, extra=counts)
    assert open_model(str(path)).config.model_type == "mixtral"
    for name in ("blk.0.surprise.weight", "blk.0.ffn_up_exps.weight"):
        header = read_gguf_header(path)
        many = replace(next(iter(header.tensors.values())), name=name, shape=(2_000_000, 1, 1), type=gguf.GGMLQuantizationType.F32, nbytes=8_000_000)
        header.tensors[name] = many
        started = time.monotonic()
        source = gguf_source.GgufSource(header, gguf_config(header), [])
        assert name in source.names()
        assert time.monotonic() - started < 1
    write(tmp_path / "n.gguf", base, extra=lambda w: [w.add_expert_count(4), w.add_expert_used_count(5)])
    with pytest.raises(ModelError, match="that a token has 5 of 4 experts"):
        open_model(str(tmp_path / "n.gguf"))
