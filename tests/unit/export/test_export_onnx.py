"""ONNX files: every weight equal by ONNX Runtime's own operators, the graph equal to transformers' model with and without its cache, and what cannot be written refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
import torch
from onnx.reference import ReferenceEvaluator
from quantized_models import quantized

from qforge import pipeline
from qforge.engines import onnx_runtime
from qforge.engines.onnx_runtime import OnnxRuntimeEngine, session
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import MissingCapabilityError, ModelError, UnsupportedError
from qforge.export.agreement import EXACT_KL, agreement, next_token_logprobs
from qforge.export.onnx import OnnxExporter
from qforge.export.verify import verify
from qforge.export.verify_onnx import read, verify_execution, verify_weights
from qforge.models.model import open_model

CPUINFO = Path("/proc/cpuinfo")
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 20}, "qwen2": {}, "qwen3": {}, "gemma3_text": {"layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma": {"head_dim": 32}, "smollm3": {"layers": 5, "use_sliding_window": True, "sliding_window": 20, "mlp_bias": True},
    "granite": tiny.GRANITE, "olmo3": {"layers": 5, "sliding_window": 20}, "exaone4": {"layers": 4, "sliding_window": 20}, "seed_oss": {},
    "phi3": {"hidden": 128, "sliding_window": 20, **tiny.longrope(16, 32)}, "glm4": {"hidden": 128}, "ernie4_5": {"use_bias": True},
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS = ("matmulnbits", "qdq")
SMALL = {"hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1, "layers": 1}


def opened(tmp_path, family="llama", dtype=torch.float32, **options):
    return open_model(str(tiny.make(tmp_path / f"source-{family}", family, dtype=dtype, **{"layers": 2, "norms": True, **FAMILIES[family], **options})))


def tokens(count, seed=0):
    return torch.randint(3, 380, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def written(model, folder, kind):
    OnnxExporter(kind).write(model, folder)
    return folder


def agrees(model, folder, bound=1e-9, engine=TransformersEngine):
    """Mean KL divergence of every position of a window, which the engine runs in two pieces over its cache; must be below the bound."""
    window = tokens(150)
    ours = torch.cat([torch.log_softmax(p.float(), -1) for p in engine(model).score([window])])
    theirs = torch.cat([torch.log_softmax(p, -1) for p in OnnxRuntimeEngine(folder).score([window])])
    kl, *others = agreement(ours, theirs)
    assert kl < bound, (kl, others)
    return kl


@pytest.mark.parametrize(("kind", "text"), [("matmulnbits", "int4-g32-sym"), ("qdq", "int4-g32-sym"), ("qdq", "fp8-e4m3-channel")])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_families(tmp_path, family, kind, text, tied):
    model = quantized(opened(tmp_path, family, torch.bfloat16, tied=tied), text, overrides={"down_proj": "int8-g64-sym"}, ignore=("o_proj",))
    folder = written(model, tmp_path / "out", kind)
    found = verify_weights(read(folder), model)
    assert found.weights_equal, found.note
    agrees(model, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"rope_parameters": LLAMA3}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, {"attention_bias": True, "mlp_bias": True}],
    ids=["llama3", "linear", "biases"],
)  # fmt: skip
def test_rotations_and_biases(tmp_path, kind, options):
    model = quantized(opened(tmp_path, **options))
    folder = written(model, tmp_path / "out", kind)
    assert verify_weights(read(folder), model).weights_equal
    agrees(model, folder)


INTEGERS = ["int4-g32-asym", "int4-g16-sym", "int2-g32-sym", "int3-g32-asym", "int5-channel-sym", "int8-channel-asym", "int4-tensor-sym", "int8-block32-sym", "int4-g32-sym@f32"]
WEIGHTS = [
    *[(kind, text) for kind in KINDS for text in INTEGERS],
    *[("qdq", t) for t in ("int4-g8-asym", "fp8-e4m3-channel", "fp8-e4m3-tensor", "fp8-e4m3-block32", "fp8-e5m2-g32")],
]


@pytest.mark.parametrize(("kind", "text"), WEIGHTS)
def test_weights_of_any_scheme(tmp_path, kind, text):
    model = quantized(opened(tmp_path, **SMALL), text)
    folder = written(model, tmp_path / "out", kind)
    found = verify_weights(read(folder), model)
    assert found.weights_equal, found.note
    agrees(model, folder)


@pytest.mark.parametrize(("text", "bound"), [("fp8-dynamic", 1e-2), ("fp8-e4m3-block32+fp8-e4m3-g32", 1e-2), ("w8a8-int8", 1e-3), ("int8-channel-sym+int8-g32", 1e-3)])
def test_rounded_activations(tmp_path, text, bound):
    """A value on the edge between two codes may fall to either side, so the bound is that of a few such values; most positions are equal."""
    model = quantized(opened(tmp_path, **SMALL), text)
    folder = written(model, tmp_path / "out", "auto")
    assert read(folder).metadata["qforge.type"] == "qdq"
    assert verify_weights(read(folder), model).weights_equal
    agrees(model, folder, bound)
    window = tokens(12)
    ours, theirs = (torch.cat(list(engine.score([window])))[0] for engine in (TransformersEngine(model), OnnxRuntimeEngine(folder)))
    assert (ours - theirs).abs().max() < 1e-4


# On CPUs that have AVX2 or AVX-512 but no VNNI, ONNX Runtime cuts sums of two products of bytes off at 16 bits (docs/onnx.md), unless its operators are left apart.
CUTS_SUMS_OFF = CPUINFO.is_file() and "avx2" in CPUINFO.read_text() and "vnni" not in CPUINFO.read_text()


@pytest.mark.parametrize("kind", ["qdq", "qdq-f16"])
@pytest.mark.parametrize("text", ["int8-channel-sym+int8-tensor-static", "fp8-e4m3-tensor+fp8-e4m3-tensor-static"])
def test_static_activation_scales(tmp_path, monkeypatch, kind, text):
    if CUTS_SUMS_OFF:
        monkeypatch.setattr(onnx_runtime, "EXACT", onnx_runtime.EXACT | onnx_runtime.UNFUSED)
    plain = quantized(opened(tmp_path, **SMALL), text)
    model = replace(plain, linears=lambda name: replace(plain.linears(name), input_scale=torch.tensor(2.0**-5)))
    folder = written(model, tmp_path / "out", kind)
    found = verify_weights(read(folder), model)
    assert found.weights_equal
    assert found.rounded is None
    foreign = replace(plain, linears=lambda name: replace(plain.linears(name), input_scale=torch.tensor(0.0123456789)))
    other = verify_weights(read(folder), foreign)
    assert other.weights_equal is False
    assert "input_scale" in other.note
    told = verify_weights(read(written(foreign, tmp_path / "foreign", kind)), foreign)
    assert told.weights_equal
    assert ("input scales" in str(told.rounded)) is (kind == "qdq-f16")
    window = tokens(6)
    from qforge.engines.runtime_engine import RuntimeEngine

    ours, theirs = (torch.cat(list(engine.score([window]))) for engine in (RuntimeEngine(model), OnnxRuntimeEngine(folder)))
    assert agreement(torch.log_softmax(ours, -1), torch.log_softmax(theirs, -1))[0] < (1e-9 if kind == "qdq" else 1e-2)
    pairs = read(folder).operators()
    assert pairs["QuantizeLinear"] == 7
    assert pairs["DequantizeLinear"] == 7
    assert pairs["Div"] - pairs["Pow"] == (7 if "fp8" in text and kind == "qdq" else 0)


@pytest.mark.parametrize(
    ("text", "kind", "bound"),
    [
        ("int4-g32-sym", "matmulnbits", EXACT_KL),
        ("int4-g32-sym", "matmulnbits-level4", None),
        ("int4-g32-sym", "qdq", EXACT_KL),
        ("int4-g32-sym", "qdq-f16", None),
        ("int8-channel-sym+int8-token", "qdq", None),
    ],
)
def test_what_computes_in_fp32_has_a_bound(tmp_path, text, kind, bound):
    model = quantized(opened(tmp_path), text)
    found = verify_execution(read(written(model, tmp_path / "out", kind)), model, TransformersEngine(model), [tokens(6), tokens(12)])
    assert found.kl_bound == bound
    assert found.passed
    assert replace(found, kl_mean=0.56).passed is (bound is None)


def test_level_4_and_fp16_are_near(tmp_path):
    model = quantized(opened(tmp_path))
    assert agrees(model, written(model, tmp_path / "level4", "matmulnbits-level4"), 5e-3) > 1e-6
    assert agrees(model, written(model, tmp_path / "f16", "qdq-f16"), 1e-4) > 1e-9
    assert verify_weights(read(tmp_path / "f16"), model).weights_equal
    assert OnnxRuntimeEngine(tmp_path / "f16").inputs["past_key_values.0.key"].type == "tensor(float16)"


def test_operators_and_types_are_those_meant(tmp_path):
    """Neither embedding nor head is quantized on the way, and every linear is."""
    model = quantized(opened(tmp_path, dtype=torch.bfloat16), overrides={"down_proj": "int8-g64-asym"})
    contrib, standard = (read(written(model, tmp_path / kind, kind)).operators() for kind in KINDS)
    layers = 2
    assert contrib == {
        "MatMulNBits int4 level 1": 6 * layers, "MatMulNBits int8 level 1": layers, "GroupQueryAttention": layers, "SimplifiedLayerNormalization": 2 * layers + 1,
        "Gather BFLOAT16": 1, "Gather": 1, "Transpose": 1, "MatMul": 1, "Cast": 4, "Add": 2 * layers, "Mul": 2 * layers, "Sigmoid": layers, "Identity": 1,
        "Shape": 1, "ReduceSum": 1, "Sub": 1,
    }  # fmt: skip
    assert standard["DequantizeLinear INT4"] == 6 * layers
    assert standard["DequantizeLinear UINT8"] == layers
    assert standard["Gather BFLOAT16"] == 1
    assert standard["MatMul"] == 7 * layers + 1 + 2 * layers
    assert standard["Softmax"] == layers
    assert all(n.domain == "" for n in read(tmp_path / "qdq").nodes)
    kinds = {onnx.TensorProto.DataType.Name(t.data_type) for n, t in read(tmp_path / "qdq").initializers.items() if n == "model.embed_tokens.weight"}
    assert kinds == {"BFLOAT16"}


def test_a_quantized_head_is_a_quantized_head(tmp_path):
    model = quantized(opened(tmp_path), head=True)
    folder = written(model, tmp_path / "out", "matmulnbits")
    assert read(folder).operators()["MatMulNBits int4 level 1"] == 15
    assert verify_weights(read(folder), model).weights_equal
    agrees(model, folder)


def test_an_unquantized_model(tmp_path):
    model = opened(tmp_path, "qwen2", torch.float16)
    for kind in KINDS:
        folder = written(model, tmp_path / kind, kind)
        assert verify_weights(read(folder), model).weights_equal
        agrees(model, folder)


def logits_of(engine, rows, width, side):
    """Each row in a batch padded on one side, prefilled together and continued by one token."""
    batch = len(rows)
    ids, mask = np.zeros((batch, width), np.int64), np.zeros((batch, width), np.int64)
    for b, row in enumerate(rows):
        where = slice(0, len(row) - 1) if side == "right" else slice(width - len(row) + 1, width)
        ids[b, where], mask[b, where] = row[:-1], 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    first, cache = engine.step(ids, mask, positions=positions)
    lengths = mask.sum(1, keepdims=True)
    after = np.ones((batch, 1), np.int64)
    mask = (np.arange(width + 1) <= lengths).astype(np.int64) if side == "right" else np.concatenate([mask, after], 1)  # right: it stands where the padding began
    second, _ = engine.step(np.array([[r[-1]] for r in rows]), mask, cache, positions=lengths)
    prefill = [first[b, len(r) - 2] if side == "right" else first[b, -1] for b, r in enumerate(rows)]
    return torch.from_numpy(np.stack([np.stack([prefill[b], second[b, 0]]) for b in range(batch)]))


@pytest.mark.parametrize(("kind", "side"), [("matmulnbits", "right"), ("qdq", "left")])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_batch_of_unequal_lengths(tmp_path, kind, side, family):
    model = quantized(opened(tmp_path, family))
    engine = OnnxRuntimeEngine(written(model, tmp_path / "out", kind))
    rows = [tokens(n, n) for n in (5, 41, 30)]
    together = logits_of(engine, rows, 40, side)
    alone = torch.stack([torch.cat(list(TransformersEngine(model).score([[*row, 0]])))[-2:] for row in rows])
    assert (together - alone).abs().max() < 1e-4


def test_one_token_at_a_time_is_the_whole_text_at_once(tmp_path):
    model = quantized(opened(tmp_path, "mistral"))
    window = tokens(30)
    for kind in KINDS:
        engine, cache, rows = OnnxRuntimeEngine(written(model, tmp_path / kind, kind)), (), []
        for i, token in enumerate(window):
            logits, cache = engine.step(np.array([[token]]), np.ones((1, i + 1), np.int64), cache)
            rows.append(logits[0, 0])
        whole, _ = engine.step(np.array([window]), np.ones((1, 30), np.int64))
        np.testing.assert_allclose(np.stack(rows), whole[0], atol=1e-4)
        assert cache[0].shape == (1, 2, 30, 16)


def test_the_standard_graph_by_the_onnx_packages_own_evaluator(tmp_path):
    """A third reading of the file: plain numpy, sharing nothing with ONNX Runtime; and the checker's."""
    model = quantized(opened(tmp_path, **SMALL), "int4-g32-asym")
    folder = written(model, tmp_path / "out", "qdq")
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    window = tokens(9)
    empty = np.zeros((1, 1, 0, 16), np.float32)
    feeds = {"input_ids": np.array([window]), "attention_mask": np.ones((1, 9), np.int64), "position_ids": np.arange(9)[None]}
    logits = ReferenceEvaluator(onnx.load(str(folder / "model.onnx"))).run(None, feeds | {"past_key_values.0.key": empty, "past_key_values.0.value": empty})[0]
    ours = torch.cat(list(TransformersEngine(model).score([[*window, 0]])))
    np.testing.assert_allclose(logits[0], ours.numpy(), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["scales", "weight", "embedding", "norm"])
def test_verification_sees_one_wrong_bit(tmp_path, kind, part):
    model = quantized(opened(tmp_path, layers=1), "int4-g32-asym")
    folder = written(model, tmp_path / "out", kind)
    file = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    packed = {"scales": "scales" if kind == "matmulnbits" else "scale", "weight": "B" if kind == "matmulnbits" else "weight"}
    wanted = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}.get(part) or f"model.layers.0.mlp.up_proj.{packed[part]}"
    tensor = next(t for t in file.graph.initializer if t.name == wanted)
    if tensor.raw_data:
        tensor.raw_data = bytes([tensor.raw_data[0] ^ 0x10, *tensor.raw_data[1:]])
        (folder / "model.onnx").write_bytes(file.SerializeToString())
    else:
        offset = int(next(e.value for e in tensor.external_data if e.key == "offset"))
        data = bytearray((folder / "model.onnx.data").read_bytes())
        data[offset + 9] ^= 0x10
        (folder / "model.onnx.data").write_bytes(data)
    found = verify_weights(read(folder), model)
    assert found.weights_equal is False
    assert wanted.rpartition(".")[0] in found.note


def test_equal_models_give_equal_bytes_without_paths_or_times(tmp_path):
    source = opened(tmp_path)
    files = [{p.name: p.read_bytes() for p in OnnxExporter().write(quantized(source), tmp_path / out)} for out in ("a", "b")]
    assert files[0] == files[1]
    assert not any(str(tmp_path).encode() in data for data in files[0].values())
    assert {"model.onnx", "model.onnx.data", "genai_config.json", "tokenizer.json"} <= set(files[0])


def test_large_weights_lie_in_the_data_file_at_pages_and_small_ones_in_the_model(tmp_path):
    model = quantized(opened(tmp_path, hidden=256, intermediate=1024))
    folder = written(model, tmp_path / "out", "matmulnbits")
    places = []
    for t in read(folder).initializers.values():
        if t.data_location == onnx.TensorProto.EXTERNAL:
            told = {e.key: e.value for e in t.external_data}
            assert told["location"] == "model.onnx.data"
            places.append((int(told["offset"]), int(told["length"])))
    places.sort()
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(places))
    assert sum(places[-1]) == (folder / "model.onnx.data").stat().st_size
    assert all(at % 4096 == 0 for at, size in places if size >= 65536)
    assert any(size >= 65536 for _, size in places)
    assert (folder / "model.onnx").stat().st_size < 40_000


def test_genai_config(tmp_path):
    model = quantized(opened(tmp_path, "qwen3"))
    told = {kind: json.loads((written(model, tmp_path / kind, kind) / "genai_config.json").read_text()) for kind in KINDS}
    about = told["matmulnbits"]["model"]
    assert (about["type"], about["vocab_size"], about["context_length"], about["eos_token_id"]) == ("qwen3", model.config.vocab_size, 256, 0)
    assert (about["decoder"]["head_size"], about["decoder"]["num_key_value_heads"], about["decoder"]["num_hidden_layers"]) == (16, 2, 2)
    assert "position_ids" not in about["decoder"]["inputs"]
    assert told["qdq"]["model"]["decoder"]["inputs"]["position_ids"] == "position_ids"
    assert told["matmulnbits"]["search"]["past_present_share_buffer"]
    assert not told["qdq"]["search"]["past_present_share_buffer"]


def test_genai_config_has_the_tokenizers_end_where_the_model_names_none(tmp_path):
    model = quantized(opened(tmp_path))
    (model.assets / "generation_config.json").unlink()
    path = model.assets / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"eos_token": "<|im_end|>"}))
    model.config.eos_token_id = None
    told = json.loads((written(model, tmp_path / "out", "auto") / "genai_config.json").read_text())["model"]
    assert (told["eos_token_id"], told["pad_token_id"]) == (2, 2)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("nf4-g64@f32", "auto", "holds integers and 8-bit floats, not nf4"),
        ("nvfp4", "qdq", "not fp4-e2m1"),
        ("fp8-e4m3-channel", "matmulnbits", "holds integers, not fp8"),
        ("w8a8-int8", "matmulnbits", "type qdq does"),
        ("int4-g8-sym", "matmulnbits", "no multiple of 16"),
        ("int4-g32-sym@f32", "qdq-f16", "fp16, which does not hold f32"),
        ("int4-g32-sym", "int4", "use one of auto, matmulnbits"),
    ],
)
def test_what_onnx_cannot_hold(tmp_path, text, kind, reason):
    model = quantized(opened(tmp_path), text)
    assert reason in OnnxExporter(kind).check(model)
    with pytest.raises(UnsupportedError, match=reason):
        OnnxExporter(kind).write(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_heads_that_group_query_attention_cannot_rotate_take_the_standard_operators(tmp_path):
    model = quantized(opened(tmp_path, hidden=96, heads=4, intermediate=96), "int4-g32-sym")
    assert "multiple of 16" in OnnxExporter("matmulnbits").check(model)
    folder = written(model, tmp_path / "out", "auto")
    assert read(folder).metadata["qforge.type"] == "qdq"
    agrees(model, folder)


def test_models_that_have_no_decoder_here(tmp_path):
    source = opened(tmp_path)
    assert "no ONNX decoder" in OnnxExporter().check(replace(source, spec=None))

    def shuffled(name):
        q = model.linears(name)
        return replace(q, group_index=torch.arange(q.in_features).int() % q.scales.shape[1])

    model = quantized(source)
    for kind in KINDS:
        with pytest.raises(UnsupportedError, match="activation order"):
            OnnxExporter(kind).write(replace(model, linears=shuffled), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def without(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))


def recipe(tmp_path, **section):
    tiny.make(tmp_path / "source")
    text = {"version": 1, "model": {"source": "source"}, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}, "evaluate": None, "export": [{"format": "onnx", **section}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(text))
    return tmp_path / "recipe.yaml"


def test_without_the_package_a_run_does_not_start(tmp_path, monkeypatch):
    without(monkeypatch, "onnx")
    with pytest.raises(MissingCapabilityError, match=r"pip install 'qforge\[onnx\]'") as error:
        pipeline.quantize(recipe(tmp_path), out=tmp_path / "out")
    assert error.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    results = pipeline.quantize(recipe(tmp_path, optional=True), out=tmp_path / "out")
    assert results.exports[0].path is None
    assert "pip install 'qforge[onnx]'" in results.exports[0].skipped_because


def test_a_missing_verifier_is_named(tmp_path, monkeypatch):
    model = quantized(opened(tmp_path))
    paths = OnnxExporter().write(model, tmp_path / "out")
    without(monkeypatch, "onnxruntime")
    assert verify("onnx", paths, model, TransformersEngine(model), [tokens(5)]) == ([], ["onnxruntime: onnxruntime is not installed here: pip install 'qforge[onnx]'"])
    monkeypatch.undo()
    without(monkeypatch, "onnxruntime_genai")
    done, left_out = verify("onnx", paths, model, TransformersEngine(model), [tokens(5), tokens(9)])
    assert [v.engine for v in done] == ["onnxruntime, operator by operator", "onnxruntime"]
    assert done[1].kl_mean < 1e-9
    assert "onnxruntime-genai is not installed" in left_out[0]


def test_a_run_writes_and_checks_two_types(tmp_path):
    path = recipe(tmp_path)
    path.write_text(path.read_text().replace('[{"format": "onnx"}]', '[{"format": "onnx"}, {"format": "onnx", "type": "qdq"}]'))
    results = pipeline.quantize(path, out=tmp_path / "out")
    assert [e.path for e in results.exports] == ["exports/onnx-auto", "exports/onnx-qdq"]
    assert all(e.lossless and e.verified_by[1].kl_mean < 1e-6 and e.verified_by[1].executed for e in results.exports)
    alone = pipeline.export(tmp_path / "out", "onnx", type="qdq", out=tmp_path / "alone")
    assert alone.sha256 == results.exports[1].sha256


def test_a_damaged_file_is_one_message(tmp_path):
    model = quantized(opened(tmp_path, layers=1))
    folder = written(model, tmp_path / "out", "matmulnbits")
    (folder / "model.onnx.data").write_bytes((folder / "model.onnx.data").read_bytes()[:-5000])
    with pytest.raises(ModelError, match="onnxruntime refuses"):
        OnnxRuntimeEngine(folder)
    with pytest.raises(ModelError, match="onnxruntime refuses a part"):
        session(b"no model")


def test_next_tokens_are_the_engines_last_position(tmp_path):
    model = quantized(opened(tmp_path))
    engine = OnnxRuntimeEngine(written(model, tmp_path / "out", "matmulnbits"))
    prompts = [tokens(7), tokens(140)]
    assert agreement(next_token_logprobs(TransformersEngine(model), prompts), next_token_logprobs(engine, prompts))[0] < 1e-9
