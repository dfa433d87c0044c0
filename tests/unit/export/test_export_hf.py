"""The artifact: transformers loads it unchanged and has, after one forward pass, exactly the weights that numerics.dequantize gives."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny
import torch
from quantized_models import quantized, rtn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qforge import numerics
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import QforgeError, UnsupportedError
from qforge.export import exporter
from qforge.export.hf import write_artifact
from qforge.export.verify_text import verify_text
from qforge.files import sha256_tree
from qforge.layouts.compressed_tensors_config import class_problem
from qforge.models.model import open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def in_transformers(folder, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1]]))
    return model


CASES = {
    "int4 sym": {"text": "int4-g32-sym"},
    "int4 asym": {"text": "int4-g32-asym"},
    "int8 channel": {"text": "int8-channel-sym"},
    "int8 group": {"text": "int8-g32-sym"},
    "int8 asym": {"text": "int8-g64-asym"},
    "int3": {"text": "int3-g32-sym"},
    "mixed": {"text": "int4-g32-sym", "overrides": {"down_proj": "int8-g64-sym", "v_proj": "int4-g16-sym"}},
    "mixed asym": {"text": "int4-g32-asym", "overrides": {"down_proj": "int8-g64-sym", "v_proj": "int8-channel-asym"}},
    "w8a8": {"text": "int8-channel-sym+int8-token", "overrides": {"down_proj": "int4-g32-sym"}},
    "fp8": {"text": "fp8-e4m3-channel+fp8-e4m3-token"},
    "fp8 block": {"text": "fp8-e4m3-block32+fp8-e4m3-g32"},
    "nvfp4": {"text": "nvfp4"},
    "mxfp4": {"text": "mxfp4"},
    "ignored": {"text": "int4-g32-sym", "ignore": ("down_proj", "o_proj")},
    "head": {"text": "int4-g32-sym", "head": True},
    "head asym": {"text": "int4-g32-asym", "head": True},
    "none": {"text": "int4-g32-sym", "ignore": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_the_artifact_bit_for_bit(tmp_path, case, dtype):
    source = open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=dtype)))
    schemes, linear = rtn(source, **CASES[case])
    write_artifact(tmp_path / "model", source, schemes, linear, {})
    state = in_transformers(tmp_path / "model").state_dict()
    for name in schemes:
        assert torch.equal(state[f"{name}.weight"], numerics.dequantize(linear(name))), name
    for name in source.weights.names():
        if name.removesuffix(".weight") not in schemes:
            assert torch.equal(state[name], source.weights.read(name).float()), name
    AutoTokenizer.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g32-asym", "int8-channel-sym", "fp8-e4m3-channel", "nvfp4", "mxfp4", "int8-channel-sym+int8-token"])
def test_linears_of_a_class_of_their_own_are_dequantized_on_loading(tmp_path, text):
    """transformers' FalconLinear is no nn.Linear to the code that initialises it, which fails where codes are packed."""
    source = open_model(str(tiny.make(tmp_path / "source", "falcon", layers=2, new_decoder_architecture=True)))
    schemes, linear = rtn(source, text)
    write_artifact(tmp_path / "model", source, schemes, linear, {})
    model = in_transformers(tmp_path / "model")
    for name in schemes:
        assert torch.equal(model.state_dict()[f"{name}.weight"].float(), numerics.dequantize(linear(name))), name
    assert class_problem(schemes.values(), tied=False) is None
    assert ("dequantize" in json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]) == ("+" not in text)


ROUNDED = ["int8-channel-sym+int8-token", "int8-channel-sym+int8-tensor-static", "int8-channel-asym+int8-token", "int4-g32-sym+int8-token", "fp8-e4m3-channel+fp8-e4m3-token",
           "int4-g32-asym+int8-token", "fp8-e4m3-tensor+fp8-e4m3-tensor-static", "fp8-e4m3-block32+fp8-e4m3-g32", "fp8-e4m3-block32x64+fp8-e4m3-token"]  # fmt: skip


@pytest.mark.parametrize("text", ROUNDED)
def test_transformers_rounds_activations_to_our_bits(tmp_path, text):
    source = open_model(str(tiny.make(tmp_path / "source", layers=2)))
    schemes, linear = rtn(source, text, overrides={"down_proj": "int4-g32-sym"})
    static = torch.tensor(0.03125) if text.endswith("static") else None
    write_artifact(tmp_path / "model", source, schemes, lambda n: replace(linear(n), input_scale=static if schemes[n].activations else None), {})
    window = torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        theirs = in_transformers(tmp_path / "model")(input_ids=torch.tensor([window])).logits[0, :-1]
    artifact = open_model(str(tmp_path / "model"))
    ours = torch.cat(list(TransformersEngine(artifact).score([window])))
    assert torch.equal(ours, theirs)
    unrounded = torch.cat(list(TransformersEngine(replace(artifact, schemes={})).score([window])))
    assert (ours - unrounded).abs().max() > 0.05


@pytest.mark.parametrize("case", CASES)
def test_we_read_back_what_we_wrote(tmp_path, case):
    source = open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=torch.bfloat16)))
    schemes, linear = rtn(source, **CASES[case])
    write_artifact(tmp_path / "model", source, schemes, linear, {})
    artifact = open_model(str(tmp_path / "model"))
    assert artifact.schemes == schemes
    assert artifact.dtype is torch.bfloat16
    assert all(artifact.linear(name).equals(linear(name)) for name in schemes)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "mistral"])
def test_other_families(tmp_path, family):
    source = open_model(str(tiny.make(tmp_path / "source", family, layers=2)))
    schemes, linear = rtn(source)
    write_artifact(tmp_path / "model", source, schemes, linear, {})
    state = in_transformers(tmp_path / "model").state_dict()
    assert all(torch.equal(state[f"{name}.weight"], numerics.dequantize(linear(name))) for name in schemes)
    assert all(torch.equal(state[name], source.weights.read(name)) for name in source.weights.names() if name.endswith("bias"))


def test_equal_runs_give_equal_bytes_without_paths(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "source", layers=2)))
    schemes, linear = rtn(source)
    hashes = set()
    for out in ("a", "b"):
        write_artifact(tmp_path / out, source, schemes, linear, {"recipe": "x"})
        hashes.add(sha256_tree(tmp_path / out))
        text = b"".join(p.read_bytes() for p in (tmp_path / out).iterdir() if p.suffix == ".json")
        assert str(tmp_path).encode() not in text
    assert len(hashes) == 1
    assert json.loads((tmp_path / "a/qforge.json").read_text()) == {"recipe": "x"}


def test_a_quantized_tied_head_is_untied(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "source", layers=1, tied=True)))
    schemes, linear = rtn(source, head=True)
    write_artifact(tmp_path / "model", source, schemes, linear, {})
    assert json.loads((tmp_path / "model/config.json").read_text())["tie_word_embeddings"] is False
    model = in_transformers(tmp_path / "model")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_groups_in_activation_order_are_refused_and_leave_nothing(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "source", layers=1)))
    schemes, linear = rtn(source)

    def shuffled(name):
        q = linear(name)
        return QuantizedLinear(q.scheme, q.codes, q.scales, None, torch.arange(q.in_features, dtype=torch.int32) % q.scales.shape[1])

    with pytest.raises(UnsupportedError, match="g_idx"):
        write_artifact(tmp_path / "model", source, schemes, shuffled, {})
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_schemes_that_the_layout_lacks_are_refused(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "source", layers=1)))
    q_proj, k_proj = (f"model.layers.0.self_attn.{n}_proj" for n in "qk")
    for schemes, message in (
        ({q_proj: "fp8-e5m2-channel"}, "fp8-e5m2-channel: .*has no fp8-e5m2 weights"),
        ({q_proj: "nf4-g64"}, "nf4-g64: .*holds scales as u8/g256:f32 or f32"),
        ({q_proj: "nf4", k_proj: "int8-channel-sym"}, "nf4-g64.* and int8-channel-sym together"),
        ({q_proj: "mxfp4", k_proj: "int8-channel-sym"}, "cannot multiply in float32"),
        ({q_proj: "fp4-e2m1-g32@e8m0+fp8-e4m3-token"}, "with rounded activations, to bfloat16 only"),
    ):
        with pytest.raises(QforgeError, match=message):
            write_artifact(tmp_path / "model", source, {n: parse(t) for n, t in schemes.items()}, lambda n: None, {})


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 20000.0}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("format_name", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", _LLAMA3),
        ("qwen2", _YARN),
        ("qwen3", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma3_text", {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": _PLAIN}),
    ],
)
def test_rotary_settings_stand_in_both_forms(tmp_path, format_name, family, rope):
    """Readers before transformers 5 take a base of 10000 and no scaling where they find `rope_parameters` alone; transformers 5 reads what it did."""
    model = quantized(open_model(str(tiny.make(tmp_path / "source", family, layers=1, dtype=torch.float16, rope_parameters=rope))), "int4-g32-sym")
    exporter(format_name).write(model, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    full = rope.get("full_attention", rope)
    assert told["rope_theta"] == full["rope_theta"]
    assert told.get("rope_scaling") == (None if full["rope_type"] == "default" else {k: v for k, v in full.items() if k != "rope_theta"})
    assert told.get("rope_local_base_freq") == (10000.0 if "sliding_attention" in rope else None)
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == model.config.rope_parameters
    assert open_model(str(tmp_path / "out")).spec == model.spec


@pytest.mark.parametrize("format_name", ["gptq", "compressed-tensors", "onnx", "gguf"])
def test_named_chat_templates_come_along(tmp_path, format_name):
    folder = tiny.make(tmp_path / "source", layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool-use": "TOOLS {{ messages[0]['content'] }}", "rag": "RAG"}
    tokenizer.save_pretrained(folder)
    model = quantized(open_model(str(folder)))
    assert sorted(model.tokenizer().chat_template) == ["default", "rag", "tool-use"]
    paths = exporter(format_name).write(model, tmp_path / "out")
    (found,) = verify_text(format_name, paths, model)
    assert found.text_equal, found.note
    before = model.fingerprint()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("RAG 2")
    other = quantized(open_model(str(folder)))
    assert other.fingerprint() != before
    (found,) = verify_text(format_name, paths, other)
    assert found.text_equal is False
    assert "chat template 'rag'" in found.note
    (folder / "additional_chat_templates" / "rag.jinja").unlink()
    assert "chat template 'rag'" in verify_text(format_name, paths, quantized(open_model(str(folder))))[0].note
    (folder / "additional_chat_templates" / "another.jinja").write_text("A")
    assert "it has no chat template 'another'" in verify_text(format_name, paths, quantized(open_model(str(folder))))[0].note
