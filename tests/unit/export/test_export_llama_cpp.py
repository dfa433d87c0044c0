"""llama.cpp, a program that is not ours, computes what transformers computes from the fp32 twin of each family, and nearly that from packed integers."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest
import tiny
import torch
from quantized_models import quantized

from qforge.engines import llama_cpp
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import ModelError
from qforge.export import exporter
from qforge.export.agreement import next_token_logprobs
from qforge.export.gguf import GgufExporter
from qforge.export.verify import verify
from qforge.export.verify_gguf import verify_in_llama_cpp
from qforge.models.model import open_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
OLMO3_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {**YARN, "rope_theta": 5e5, "attention_factor": 1.2}}
CASES = {
    "llama": ("llama", {}),
    "llama3 scaling": ("llama", {"hidden": 256, "heads": 4, "rope_parameters": LLAMA3}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "yarn scaling": ("llama", {"rope_parameters": YARN}),
    "yarn with an attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}),
    "yarn with an attention factor in qwen2": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "untied with biases": ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"layers": 7, "sliding_window": 32, "query_pre_attn_scalar": 16}),
    "gemma": ("gemma", {"head_dim": 32}),
    "smollm3": ("smollm3", {"layers": 5}),
    "smollm3 with windows": ("smollm3", {"layers": 5, "use_sliding_window": True, "sliding_window": 64}),
    "granite": ("granite", tiny.GRANITE),
    "granite with biases": ("granite", tiny.GRANITE | {"hidden": 256, "heads": 4, "tied": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "seed oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 scaled": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "hidden": 256, "heads": 4, "rope_parameters": LLAMA3}),
    "exaone4 with windows": ("exaone4", {"layers": 64, "hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "sliding_window": 20}),
    "olmo2": ("olmo2", {"tied": False}),
    "olmo3": ("olmo3", {"tied": False, "layers": 5, "sliding_window": 20, "rope_parameters": OLMO3_ROPES}),
    "glm4": ("glm4", {}),
    "ernie4.5": ("ernie4_5", {}),
    "phi3": ("phi3", {"sliding_window": 64}),
    "phi3 untied": ("phi3", {"tied": False, "kv_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3 longrope": ("phi3", tiny.longrope()),
    "phi3 longrope, another context": ("phi3", tiny.longrope() | {"original_max_position_embeddings": 300, "sliding_window": 250}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}),
}
WINDOWS = ("gemma3_text", "exaone4", "olmo3")  # which llama.cpp computes
FIRST = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma", "smollm3", "granite")
GELU = ("gemma", "gemma3_text")  # ggml's is a table in fp16
pytestmark = pytest.mark.slow


def prompts(vocab_size, lengths):
    rng = random.Random(0)
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_the_f32_twin_agrees(tmp_path, case):
    family, options = CASES[case]
    model = quantized(open_model(str(tiny.make(tmp_path / "source", family, **{"layers": 2, "norms": True, **options}))))
    (path,) = GgufExporter("f32").write(model, tmp_path / "out")
    given = prompts(model.config.vocab_size, (3, 20, 60) if "sliding_window" in options and family not in WINDOWS else (3, 60, 150))
    engine = llama_cpp.LlamaCppEngine(path)
    theirs = next_token_logprobs(engine, given)
    ours = next_token_logprobs(TransformersEngine(model), given)
    assert "xllamacpp" in engine.version
    assert (theirs - ours).abs().max() < (5e-3 if family in GELU else 1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [*FIRST, "phi3 longrope", "glm4", "ernie4.5", "seed oss", "exaone4", "olmo2", "olmo3", "mixtral", "qwen3 moe"])
def test_every_family_passes_the_rows_of_a_real_model(tmp_path, family, tied):
    """The weights that llama.cpp's C code makes of the integers are ours, and what it computes of the same weights in fp32 is what transformers computes."""
    name, options = CASES[family]
    if family == "gemma" and not tied:
        pytest.skip("its head is always the embedding")
    if "olmo" in family and tied:
        pytest.skip("its head is never the embedding")
    source = open_model(str(tiny.make(tmp_path / "source", name, **{"layers": 2, "dtype": torch.bfloat16, **options, "tied": tied})))
    model = quantized(source, overrides={"down_proj": "int8-g64-sym", "w2": "int8-g64-sym"})
    rounded = 0.05 if model.spec.experts is None else 0.1  # of 6 positions, one may go to another expert where activations are rounded
    for kind, bound in (("auto", rounded), ("f32", 1e-3)):
        paths = GgufExporter(kind).write(model, tmp_path / kind)
        found, left_out = verify("gguf", paths, model, TransformersEngine(model), prompts(model.config.vocab_size, (3, 20, 60)))
        assert not left_out
        assert [v.weights_equal for v in found] == [True, True], found
        assert found[1].executed
        assert found[1].kl_mean < bound, (kind, found)
    held = {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "auto" / "model-q4_0.gguf").tensors}
    assert held == {"Q4_0", "Q8_0", "BF16", "F32"}
    assert ("output.weight" in {t.name for t in gguf.GGUFReader(paths[0]).tensors}) is not tied


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "mixtral"])
def test_every_family_passes_the_rows_of_zero_points_and_mixes(tmp_path, family, tied):
    """256 wide, so that K-quants are what the mixes say; llama.cpp over the same weights in F32 is exact, over the blocks it rounds activations to 8 bits."""
    name, options = CASES[family]
    source = open_model(
        str(tiny.make(tmp_path / "source", name, **{"layers": 2, "hidden": 256, "intermediate": 256, "heads": 16, "tied": tied, "dtype": torch.bfloat16, **options}))
    )
    given = prompts(source.config.vocab_size, (3, 20, 60))
    for kind, text, types in (("q5_0", "int4-g32-asym", {"Q5_0"}), ("q4_k_m", "int8-channel-sym", {"Q4_K", "Q6_K"}), ("q6_k", "int8-channel-sym", {"Q6_K"})):
        model = quantized(source, text)
        paths = exporter("gguf", kind).write(model, tmp_path / kind)
        found, left_out = verify("gguf", paths, model, TransformersEngine(model), given)
        assert not left_out
        assert found[-1].kl_mean < 0.05, (kind, found)
        reader = gguf.GGUFReader(paths[0])
        assert {t.tensor_type.name for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) > 1 and "ffn_gate_inp" not in t.name} == types
        held = open_model(str(paths[0]), dtype="float32")
        twin = exporter("gguf", "f32").write(held, tmp_path / f"{kind}-twin")
        ran, _ = verify("gguf", twin, held, TransformersEngine(held), given)
        assert [v.weights_equal for v in ran] == [True, True], ran
        assert ran[1].kl_mean < (1e-3 if family == "gemma3" else 1e-6), (kind, ran)  # ggml's GELU is a table in fp16


def test_blocks_that_llama_cpp_reads_otherwise_are_named(tmp_path, monkeypatch):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1))))
    (path,) = GgufExporter().write(model, tmp_path / "out")
    plain = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: plain(data, kind) + (np.float32(1e-8) if data.shape[0] == 32 else 0))  # k and v have 32 rows
    found = verify_in_llama_cpp(path, model, TransformersEngine(model), [[5, 6]])
    assert found.weights_equal is False
    assert "blk.0.attn_k.weight, blk.0.attn_v.weight;" in found.note


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g32-asym", "int8-channel-sym"])
def test_packed_integers_run(tmp_path, text):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=2))), text)
    paths = GgufExporter().write(model, tmp_path / "out")
    done, skipped = verify("gguf", paths, model, TransformersEngine(model), prompts(model.config.vocab_size, (10, 40, 80)))
    assert not skipped
    assert done[0].weights_equal
    assert done[1].positions == 3
    assert done[1].kl_mean < 0.02


def test_a_damaged_file_is_one_message(tmp_path):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1))))
    (path,) = GgufExporter().write(model, tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"llama\.cpp could not run model-q4_0\.gguf"):
        verify_in_llama_cpp(path, model, TransformersEngine(model), [[5, 6]])


def test_a_whole_text_runs_in_llama_cpp_as_on_our_runtime(tmp_path):
    """Every position of a text, not a sample: the F32 twin is the same model, and Q4_0 differs by llama.cpp's 8-bit activations only."""
    from qforge.engines.runtime_engine import RuntimeEngine
    from qforge.text.documents import documents
    from qforge.text.windows import evaluation_windows

    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=2))), "int4-g32-sym")
    tokenizer = model.tokenizer()
    text = documents("builtin", role="evaluation", folder=tmp_path, tokenizer=tokenizer)
    windows = evaluation_windows(text, tokenizer, 96).ids[::40][:10]
    given = [w[:n] for w in windows for n in range(1, len(w))]
    assert len(given) == 950
    ours = next_token_logprobs(RuntimeEngine(model), given)
    figures = {}
    for kind in ("f32", "auto"):
        (path,) = GgufExporter(kind).write(model, tmp_path / kind)
        theirs = next_token_logprobs(llama_cpp.LlamaCppEngine(path), given)
        figures[kind] = float((ours.double().exp() * (ours - theirs).double()).sum(-1).mean()), float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
    print(figures)
    assert abs(figures["f32"][0]) < 1e-6
    assert figures["f32"][1] == 1.0
    assert 0 < figures["auto"][0] < 5e-3
    assert figures["auto"][1] > 0.95
