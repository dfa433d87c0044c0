"""GGUF files: tensors equal by the gguf package, metadata complete, and what llama.cpp cannot be told is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import gguf
import numpy as np
import pytest
import tiny
import torch
from quantized_models import quantized

from qforge.errors import QforgeError, UnsupportedError
from qforge.export import exporter
from qforge.export.agreement import seeded_prompts
from qforge.export.gguf import GgufExporter
from qforge.export.gguf_metadata import metadata_problem, rope_factors
from qforge.export.gguf_types import MIXES, tensor_type
from qforge.export.verify_gguf import verify_gguf_weights
from qforge.models.assets import end_ids
from qforge.models.model import open_model
from qforge.models.names import GGUF_ARCHITECTURES
from qforge.types import RopeSpec

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
OLMO3_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {**YARN, "rope_theta": 5e5}}
EXAONE4_64 = {"layers": 64, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "sliding_window": 20}
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 64}, "qwen2": {}, "qwen3": {}, "gemma3_text": {"layers": 7, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma": {"head_dim": 32}, "smollm3": {"layers": 5}, "granite": tiny.GRANITE, "seed_oss": {}, "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "olmo2": {"tied": False}, "olmo3": {"tied": False, "layers": 5, "sliding_window": 20, "rope_parameters": OLMO3_ROPES},
    "phi3": tiny.longrope(), "glm4": {}, "ernie4_5": {},
}  # fmt: skip
FAMILIES |= {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
}


def opened(tmp_path, family="llama", dtype=torch.float32, **options):
    return open_model(str(tiny.make(tmp_path / f"source-{family}", family, dtype=dtype, **{"layers": 2, "norms": True, **FAMILIES[family], **options})))


def near(value):
    """What fp32 makes of numbers."""
    if isinstance(value, dict):
        return {name: near(v) for name, v in value.items()}
    return tuple(map(near, value)) if isinstance(value, tuple) else pytest.approx(value, rel=1e-7) if isinstance(value, float) else value


def fields(path):
    return {f.name: f.contents() for f in gguf.GGUFReader(path).fields.values()}


@pytest.mark.parametrize(
    ("text", "kind"),
    [("int4-g32-sym", "q4_0"), ("int4-g32-asym", "q5_0"), ("int8-channel-sym", "q8_0"), ("int4-channel-sym", "q4_0"), ("int3-g64-asym", "q4_0"), ("int5-g32-asym", "q8_0")],
)
def test_auto_takes_the_smallest_type_that_holds_the_integers(tmp_path, text, kind):
    model = quantized(opened(tmp_path), text)
    exporter = GgufExporter()
    assert exporter.check(model) is None
    (path,) = exporter.write(model, tmp_path / "out")
    assert path.name == f"model-{kind}.gguf"
    assert verify_gguf_weights(path, model).weights_equal


@pytest.mark.parametrize("text", ["int4-g256-asym", "int4-channel-asym"])
def test_one_zero_point_for_256_inputs_is_a_q4_k_and_comes_back(tmp_path, text):
    model = quantized(opened(tmp_path, hidden=256, intermediate=512, layers=1), text)
    (path,) = GgufExporter().write(model, tmp_path / "out")
    assert path.name == "model-q4_k.gguf"
    assert verify_gguf_weights(path, model).weights_equal
    back = open_model(str(path))
    assert back.schemes == model.schemes
    assert all(torch.equal(getattr(back.linear(n), part), getattr(model.linear(n), part)) for n in model.schemes for part in ("codes", "scales", "zeros"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_families(tmp_path, family, dtype, tied):
    model = quantized(opened(tmp_path, family, dtype, tied=tied), "int4-g32-sym", overrides={"down_proj": "int8-g64-sym"}, ignore=("o_proj",))
    if family == "gemma" and not tied:
        assert GgufExporter().check(model) == "llama.cpp's gemma has no tensor for lm_head.weight"
        return
    if family in ("olmo2", "olmo3") and tied:
        assert "an output head of its own" in GgufExporter().check(model)
        return
    (path,) = GgufExporter().write(model, tmp_path / "out")
    found = verify_gguf_weights(path, model)
    assert found.weights_equal, found.note
    assert ("output.weight" in {t.name for t in gguf.GGUFReader(path).tensors}) is not tied


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mistral"])
def test_a_file_reads_back_as_the_model_that_it_was_made_of(tmp_path, family):
    model = opened(tmp_path, family)
    (path,) = GgufExporter("f32").write(model, tmp_path / "out")
    back = open_model(str(path))
    assert model.spec.family == back.spec.family
    for part, value in asdict(model.spec).items():
        assert asdict(back.spec)[part] == near(value), part
    for name in model.weights.names():
        torch.testing.assert_close(back.weights.read(name), model.weights.read(name), rtol=0, atol=2e-7 if "norm" in name else 0)


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g48-asym"])
def test_the_f32_twin_holds_any_scheme(tmp_path, text):
    model = quantized(opened(tmp_path, hidden=96, heads=3, kv_heads=3, intermediate=96), text, head=True)
    exporter = GgufExporter("f32")
    (path,) = exporter.write(model, tmp_path / "out")
    assert path.name == "model-f32.gguf"
    assert verify_gguf_weights(path, model).weights_equal
    assert verify_gguf_weights(path, model).rounded is None


@pytest.mark.parametrize("text", ["fp8-e4m3-block32", "nf4-g32@u8/g256:f32", "int8-tensor-asym", "nvfp4"])
def test_the_f32_twin_has_its_rows_in_llamas_order(tmp_path, text):
    """Whatever scales go over several rows, or over several scales."""
    model = quantized(opened(tmp_path, hidden=256, intermediate=256, layers=1), text)
    (path,) = GgufExporter("f32").write(model, tmp_path / "out")
    found = verify_gguf_weights(path, model)
    assert found.weights_equal, found.note
    (mix,) = exporter("gguf", "q6_k").write(model, tmp_path / "mix")
    (twin,) = exporter("gguf", "q6_k").write(open_model(str(path)), tmp_path / "twin")
    ours, theirs = ({t.name: t.data.tobytes() for t in gguf.GGUFReader(p).tensors if len(t.shape) == 2} for p in (mix, twin))
    assert ours == theirs


def test_sixteen_bit_types_say_that_they_round(tmp_path):
    model = quantized(opened(tmp_path))
    (path,) = GgufExporter("f16").write(model, tmp_path / "out")
    found = verify_gguf_weights(path, model)
    assert found.weights_equal
    assert found.rounded == "rounded to 16 bits"
    assert found.passed
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x10
    path.write_bytes(data)
    assert verify_gguf_weights(path, model).weights_equal is False
    plain = opened(tmp_path, "qwen2", torch.bfloat16)
    (path,) = GgufExporter("bf16").write(plain, tmp_path / "out")
    found = verify_gguf_weights(path, plain)
    assert found.weights_equal
    assert found.rounded is None


def test_verification_sees_one_wrong_byte(tmp_path):
    model = quantized(opened(tmp_path))
    (path,) = GgufExporter().write(model, tmp_path / "out")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset + 18 * 7 + 5] ^= 0x10
    path.write_bytes(data)
    found = verify_gguf_weights(path, model)
    assert found.weights_equal is False
    assert "model.layers.1.mlp.up_proj" in found.note


def test_metadata(tmp_path):
    model = quantized(opened(tmp_path, "mistral"))
    (path,) = GgufExporter().write(model, tmp_path / "out")
    found = fields(path)
    assert found["general.architecture"] == "llama"
    assert found["llama.context_length"] == 64  # llama.cpp has no sliding window there
    assert found["llama.rope.dimension_count"] == found["llama.attention.key_length"] == 16
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert "<|im_start|>" in found["tokenizer.chat_template"]
    assert not any(str(tmp_path) in str(v) for v in found.values())


@pytest.mark.parametrize(("options", "context"), [({}, 256), ({"use_sliding_window": True, "sliding_window": 40}, 40)])
def test_a_context_ends_where_a_window_would_begin_to_slide(tmp_path, options, context):
    (path,) = GgufExporter("f32").write(opened(tmp_path, "smollm3", **options), tmp_path / "out")
    assert fields(path)["smollm3.context_length"] == context


def test_a_second_end_token_is_the_end_of_a_turn(tmp_path):
    model = quantized(opened(tmp_path))
    (plain,) = GgufExporter().write(model, tmp_path / "plain")
    assert "tokenizer.ggml.eot_token_id" not in fields(plain)
    (model.assets / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (path,) = GgufExporter().write(model, tmp_path / "out")
    found = fields(path)
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (0, 2)
    read_back = open_model(str(path))
    assert end_ids(read_back.assets, read_back.config) == [0, 2]


@pytest.mark.parametrize(("told", "eos", "eot"), [([2], 2, None), ([2, 5], 2, 5), (None, 0, None)])
def test_a_tokenizer_without_an_end_has_the_models(tmp_path, told, eos, eot):
    """Where a file names no end, llama.cpp takes token 11 for it."""
    model = quantized(opened(tmp_path))
    path = model.assets / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_bytes()).items() if k != "eos_token"}))
    (model.assets / "special_tokens_map.json").unlink(missing_ok=True)
    (model.assets / "generation_config.json").write_text(json.dumps({} if told is None else {"eos_token_id": told}))
    assert model.tokenizer().eos_token_id is None
    (path,) = GgufExporter().write(model, tmp_path / "out")
    assert (fields(path)["tokenizer.ggml.eos_token_id"], fields(path).get("tokenizer.ggml.eot_token_id")) == (eos, eot)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("generation_config.json", "eos_token_id", 1 << 40),
        ("config.json", "max_position_embeddings", 1 << 40),
        ("tokenizer_config.json", "chat_template", "\ud800"),
        ("tokenizer_config.json", "chat_template", 0.5),
        ("tokenizer_config.json", "chat_template", [0.5]),
        ("tokenizer_config.json", "chat_template", {"default": 7}),
    ],
)
def test_what_gguf_has_no_room_for(tmp_path, name, key, value):
    model = quantized(opened(tmp_path))
    path = model.assets / name
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: value}))
    (model.assets / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(QforgeError, match=r"cannot hold|is no text|cannot be loaded"):
        GgufExporter().write(quantized(open_model(str(model.assets))), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_equal_models_give_equal_bytes(tmp_path):
    source = opened(tmp_path)
    files = [GgufExporter().write(quantized(source), tmp_path / out)[0].read_bytes() for out in ("a", "b")]
    assert files[0] == files[1]


def test_llama3_rotary_factors_are_transformers_own(tmp_path):
    model = opened(tmp_path, rope_parameters=LLAMA3, hidden=256, heads=4)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    unscaled = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(unscaled / rope_factors(model.spec, {})["rope_freqs.weight"], scaled.numpy(), rtol=1e-5)
    (path,) = GgufExporter().write(quantized(model), tmp_path / "out")
    assert "rope_freqs.weight" in {t.name for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("int4-g32-asym", "q4_0", "type q5_0 does"),
        ("int8-channel-sym", "q4_0", "type q8_0 does"),
        ("int8-channel-asym", "auto", "a mix that quantizes anew"),
        ("int4-g16-sym", "auto", "multiple of 32"),
        ("fp8-e4m3-channel", "auto", "no GGUF type holds"),
        ("int4-g32-sym@f32", "auto", "no GGUF type holds"),
        ("int4-g32-sym", "q9_9", "not available"),
    ],
)
def test_what_gguf_cannot_hold(tmp_path, text, kind, reason):
    model = quantized(opened(tmp_path), text)
    assert reason in GgufExporter(kind).check(model)
    with pytest.raises(UnsupportedError, match=reason):
        GgufExporter(kind).write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_llama_cpp_cannot_be_told(tmp_path):
    source = opened(tmp_path)
    assert "not quantized" in GgufExporter("q4_0").check(source)
    assert "without a GGUF form" in GgufExporter().check(replace(source, spec=None))
    gemma = opened(tmp_path, "gemma3_text").spec
    assert metadata_problem(gemma) is None
    assert "other" in metadata_problem(replace(gemma, layer_windows=(32,) * 7))
    assert "rotary base" in metadata_problem(replace(gemma, layer_ropes=(RopeSpec(5.0),) * 7))
    assert "scales queries" in metadata_problem(replace(gemma, attention_scale=0.1))
    yarn = RopeSpec(1e4, "yarn", (("factor", 4.0), ("attention_factor", 2.0)))
    assert metadata_problem(replace(source.spec, layer_ropes=(yarn, yarn))) is None
    assert "attention factor" in metadata_problem(replace(gemma, layer_ropes=(*gemma.layer_ropes[:5], yarn, gemma.layer_ropes[6])))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("mistral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_act"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("gemma3_text", {"attention_bias": True}, "attention_bias"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma", {"attention_bias": True}, "attention_bias"),
        ("smollm3", {"attention_bias": True}, "attention_bias"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias"),
        ("smollm3", {"rope_parameters": LLAMA3}, "llama3"),
        ("smollm3", {"no_rope_layer_interval": 3}, "every 4th layer"),
        ("smollm3", {"no_rope_layers": [0] * 5}, "every 4th layer"),
        ("seed_oss", {"mlp_bias": True}, "biases of q, k and v only"),
        ("seed_oss", {"attention_out_bias": True}, "biases of q, k and v only"),
        ("ernie4_5", {"use_bias": True}, "adds no bias"),
        ("olmo2", {"attention_bias": True}, "attention_bias"),
        ("olmo2", {"head_dim": 32}, "4 x 32 beside 64"),
        ("glm4", {"head_dim": 32}, "4 x 32 beside 64"),
        ("exaone4", {"head_dim": 32}, "4 x 32 beside 64"),
        ("exaone4", {"sliding_window": 20}, "rotates in all layers where it has no windows"),
        ("exaone4", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}, "has windows if it has 64 layers, and this model has 2"),
        ("exaone4", {**EXAONE4_64, "layer_types": ["full_attention"] * 64}, "of 64 layers has windows of one width in all but every 4th"),
        ("exaone4", {**EXAONE4_64, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 21 + ["full_attention"]}, "in all but every 4th"),
        ("olmo3", {"layer_types": (["sliding_attention"] * 2 + ["full_attention"] * 3)}, "windows of one width in all but every 4th"),
        ("olmo3", {"rope_parameters": {**OLMO3_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, "one rotary base"),
        ("olmo3", {"rope_parameters": {**OLMO3_ROPES, "sliding_attention": OLMO3_ROPES["full_attention"]}}, "one rotary base"),
        ("phi3", {"original_max_position_embeddings": 200}, "takes LongRoPE's long factors beyond 200"),
        ("phi3", {"original_max_position_embeddings": 300, "sliding_window": 280}, "makes room for 512 tokens where 280 are asked for"),
        ("qwen2", {"rope_parameters": LLAMA3}, "llama3"),
        ("qwen3", {"rope_parameters": LLAMA3}, "llama3"),
        ("gemma3_text", {"rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}, "llama3"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "beta_fast"),
        ("llama", {"rope_parameters": {**YARN, "beta_slow": 2.0}}, "beta_slow"),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_otherwise(tmp_path, family, options, reason):
    """llama.cpp takes some and computes something else (other activations, layers without rotation, betas); the rest it refuses when it loads them."""
    model = opened(tmp_path, family, **options)
    assert reason in GgufExporter("f32").check(model)
    assert reason in exporter("gguf", "q4_k_m").check(quantized(model))


def test_biases_that_a_family_does_not_read_are_none(tmp_path):
    for family, options in (("exaone4", {"attention_bias": True, "mlp_bias": True}), ("ernie4_5", {"attention_bias": True, "mlp_bias": True}), ("phi3", {"attention_bias": True})):
        model = opened(tmp_path, family, **options)
        assert not any(".bias" in name for name in model.weights.names())
        assert GgufExporter().check(model) is None


def test_groups_in_activation_order_leave_nothing(tmp_path):
    model = quantized(opened(tmp_path))

    def shuffled(name):
        q = model.linears(name)
        return replace(q, group_index=torch.arange(q.in_features).int() % q.scales.shape[1])

    with pytest.raises(UnsupportedError, match="activation order"):
        GgufExporter().write(replace(model, linears=shuffled), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_seeded_prompts_are_prefixes_and_differ():
    windows = [list(range(i, i + 200)) for i in range(3)] + [[1, 2, 3]]
    prompts = seeded_prompts(windows)
    assert len(prompts) == 64
    assert len({tuple(p) for p in prompts}) == 64
    assert all(any(p == w[: len(p)] for w in windows) for p in prompts)
    assert prompts == seeded_prompts(windows)
    assert prompts != seeded_prompts(windows, seed=1)
    assert max(map(len, prompts)) <= 128


def test_a_family_without_a_gguf_form_is_told_those_that_have_one(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "gemma2", "gemma2", layers=1)))
    assert GgufExporter().check(source) == f"a 'gemma2' model is of a family that has no GGUF form here; the families {', '.join(GGUF_ARCHITECTURES)} have"
    source = opened(tmp_path)
    assert GgufExporter().check(replace(source, spec=None)) == "this 'llama' model has settings without a GGUF form here (of its rotary embedding, activation or attention)"


def test_phi3_keeps_its_window_which_llama_cpp_passes_over(tmp_path):
    """So the file's context is no longer than that; and never beyond the sequences that LongRoPE's short factors are for."""
    for window, context in ((64, 64), (None, 256)):
        model = opened(tmp_path / str(window), "phi3", sliding_window=window)
        (path,) = GgufExporter("f32").write(model, tmp_path / f"out-{window}")
        told = fields(path)
        assert (told["phi3.attention.sliding_window"], told["phi3.context_length"]) == (window or 0, context)
        assert (told["phi3.rope.dimension_count"], told["phi3.rope.scaling.original_context_length"]) == (12, 256)
        assert open_model(str(path)).spec.layer_windows == model.spec.layer_windows == (window or 0,) * 2


def test_phi3_with_heads_of_another_width_is_refused(tmp_path):
    spec = opened(tmp_path, "phi3").spec
    assert metadata_problem(spec) is None
    assert "4 x 32 beside 64" in metadata_problem(replace(spec, head_dim=32))


@pytest.mark.parametrize("mix", MIXES)
def test_fused_queries_keys_and_values_have_the_type_of_values(tmp_path, mix):
    """As llama.cpp's quantizer has it: what holds values is an `attn_v`."""
    spec = opened(tmp_path, "phi3", layers=1).spec
    spec = replace(spec, num_layers=17)
    for layer in range(17):
        fused, values = (tensor_type(MIXES[mix], f"blk.{layer}.{part}.weight", 256, spec, True) for part in ("attn_qkv", "attn_v"))
        assert fused == values
