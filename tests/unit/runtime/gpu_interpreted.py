"""The decoder for GPUs, its kernels in Triton's interpreter, against the reference decoder.

Run by test_runtime_gpu.py in a process of its own, because Triton reads the variable when it is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import runtime_models
import torch
from replayed import replaying
from runtime_models import model, prompts, quantized
from shared_models import Exchange, together
from tiny import GRANITE, longrope
from tolerances import GPU_LOGITS

from qforge.errors import ModelError
from qforge.models.model import Model
from qforge.runtime import LLM, SamplingParams, gpu_decoder, sampler, shared_loader
from qforge.runtime.decoder import Decoder
from qforge.runtime.gpu_decoder import GpuDecoder
from qforge.runtime.loader import read
from qforge.runtime.places import Gpu
from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Draw, Sequence
from qforge.runtime.shared_loader import read_share
from qforge.runtime.shares import Share
from qforge.runtime.step import StepInput, build_step

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import gpu_runtime

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for the 0 / 0 of rows that are not stored
PLACE = Gpu(torch.device("cpu"), torch.float16)
runtime_models.FAMILIES |= {
    "small": ("llama", {"layers": 1, "norms": False}),
    "small qwen3": ("qwen3", {"layers": 1}),
    "small gemma3": ("gemma3_text", {"layers": 2, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    "small smollm3": ("smollm3", {"layers": 2, "no_rope_layers": [1, 0]}),
    "small granite": ("granite", {"layers": 2, **GRANITE}),
    "small olmo3": ("olmo3", {"layers": 2, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
    "small phi3": ("phi3", {"layers": 1, **longrope()}),
    "small glm4": ("glm4", {"layers": 1}),
    "small qwen2": ("qwen2", {"layers": 1, "tied": False}),
}


def on_gpu(of: Model, stored: torch.dtype = torch.float16, graphs: bool = False) -> LLM:
    llm = LLM(of, max_step_tokens=9, num_blocks=12)
    capture = replaying if graphs else None
    llm.runner = GpuDecoder(read(of, PLACE), PLACE, num_blocks=12, block_size=16, stored=stored, max_num_seqs=3, capture=capture)
    return llm


def reference(of: Model, kv_cache: str = "fp32") -> LLM:
    llm = LLM(of, max_step_tokens=9, num_blocks=12)
    llm.runner = Decoder(read(of), num_blocks=12, block_size=16, kv_cache=kv_cache)
    return llm


def apart(of: Model, stored: torch.dtype = torch.float16, tokens: int = 30, kv_cache: str = "fp32") -> float:
    window = prompts(1, 2, seed=3)[0] + prompts(1, 400, seed=9)[0][:tokens]
    want, got = (torch.cat(list(llm.score([window]))) for llm in (reference(of, kv_cache), on_gpu(of, stored)))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("name", "scheme", "kernel"),
    [
        ("small", lambda n: "int4-g32-asym", "triton-w4a16"),
        ("small qwen3", lambda n: "int4-channel-sym", "triton-w4a16"),
        ("small qwen2", lambda n: None if "k_proj" in n else "nf4-g32", "dense-float16"),
        ("small gemma3", lambda n: None, "dense-float16"),
        ("small smollm3", lambda n: None, "dense-float16"),
        ("small granite", lambda n: None, "dense-float16"),
        ("small olmo3", lambda n: None, "dense-float16"),
        ("small glm4", lambda n: None, "dense-float16"),
        ("small phi3", lambda n: "int4-g32-asym", "triton-w4a16"),
    ],
)
def test_logits_are_those_of_the_reference(name: str, scheme: Callable[[str], str | None], kernel: str) -> None:
    of, _ = quantized(name, scheme)
    assert apart(of) < GPU_LOGITS["fp16"]
    assert any(k.startswith(kernel) for k in on_gpu(of).kernels())


def test_rounded_activations_run_on_8_bit_kernels() -> None:
    """A code that falls the other way moves logits."""
    of, _ = quantized("small", lambda n: "int8-channel-sym+int8-token")
    assert apart(of) < 2e-2
    assert on_gpu(of).kernels() == {"triton-w8a8": 4, "dense-float16": 1}


def test_a_head_and_an_embedding_that_share_integers_share_a_table() -> None:
    of, _ = quantized("small", lambda n: "int4-g32-sym", head="int8-g32-sym")
    weights = read(of, PLACE)
    assert apart(of, tokens=6) < GPU_LOGITS["fp16"]
    assert isinstance(weights.head.table, torch.Tensor)
    assert weights.nbytes() == weights.head.table.nbytes + sum(
        p.parts[0].nbytes for layer in weights.layers for p in (layer.qkv, layer.output, layer.mlps[0].gate_up, layer.mlps[0].down)
    )


def test_a_cache_of_8_bits_changes_logits_little() -> None:
    assert 0 < apart(model("small"), torch.int8) < GPU_LOGITS["int8"]


def test_calibrated_keys_and_values_are_rounded_as_the_reference_rounds_them() -> None:
    """But where 16 bits fall to the other side of a border."""
    of = replace(model("small"), kv_scales={"model.layers.0.self_attn": (0.02, 0.005)})
    assert apart(of, torch.float8_e4m3fn, kv_cache="fp8") < 0.3 * apart(of, torch.float8_e4m3fn)


def test_two_shares_compute_what_one_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loader, "distributed", Exchange())
    of, _ = quantized("small", lambda n: "int4-g32-asym")
    of = replace(of, kv_scales={"model.layers.0.self_attn": (0.02, 0.005)})
    assert read_share(of, PLACE, Share(1, 2)).spec.kv_scales == ((0.02, 0.005),)
    runners = [GpuDecoder(read_share(of, PLACE, Share(r, 2)), PLACE, num_blocks=4, block_size=16, stored=torch.float16, max_num_seqs=1) for r in range(2)]
    sequence = Sequence(0, prompts(1, 400, seed=9)[0][:20], 20, SamplingParams(prompt_logprobs=0), 0, 30, frozenset(), block_table=[1, 0])
    step = build_step([Piece(sequence, 0, 20)], 16)
    first, second = together([lambda r=r: r.step(step) for r in runners])  # type: ignore[misc]
    want = Decoder(read(of), num_blocks=4, block_size=16).step(step)
    assert torch.equal(first, second)
    assert (first - want).norm() < GPU_LOGITS["fp16"] * want.norm()


def test_gpu_runtime_makes_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the graphs, with a tiny shape."""
    tiny = gpu_runtime.Shape(32, 32, 1, 2, 1, 16, False)
    for name, value in (
        ("SHAPES", {"tiny": tiny}),
        ("BATCHES", (1, 2)),
        ("REQUESTS", 2),
        ("ALONE", 1),
        ("LENGTHS", (2, 3)),
        ("PROMPT", 2),
        ("STEPS", 3),
        ("SCHEMES", ("int4-g32-sym",)),
    ):
        monkeypatch.setattr(gpu_runtime, name, value)
    rows = list(gpu_runtime.measure(("tiny",), PLACE, lambda: replaying))
    assert [r["what"] for r in rows if r["engine"] == "qforge"] == ["recording", "decode", "decode", "throughput", "decode", "decode", "throughput"]
    assert all(r["tokens_per_second"] > 0 for r in rows if r["engine"] == "qforge" and r["what"] != "recording")
    assert set(gpu_runtime.summary(rows)[0]) == {"model", "plain_ms", "recorded_ms", "recording_divides_by", "times_one_by_one", "times_one_batch"}


def test_greedy_tokens_are_those_of_the_reference_in_batches_cut_prompts_and_recorded_steps() -> None:
    of, _ = quantized("small", lambda n: "int4-g32-sym")
    given = prompts(3, 24, seed=6)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    want, eager, recorded = ([o.token_ids for o in llm.generate(given, params)] for llm in (reference(of), on_gpu(of), on_gpu(of, graphs=True)))
    assert eager == want
    assert recorded == want


def test_tokens_are_drawn_where_the_logits_are_as_the_sampler_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens leave the device; a step that reaches no last token chooses none."""
    monkeypatch.setattr(gpu_decoder, "sample", functools.partial(gpu_decoder.sample, chunk=128))  # the interpreter sorts slowly
    runner = GpuDecoder(read(model("small"), PLACE), PLACE, num_blocks=4, block_size=16, stored=torch.float16, max_num_seqs=3)
    how = ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.2, "top_p": 0.7, "min_p": 0.01})
    sequences = [Sequence(i, p, len(p), SamplingParams(**h), 3 + i, 40, frozenset(), block_table=[i]) for i, (p, h) in enumerate(zip(prompts(3, 12, seed=2), how, strict=True))]  # type: ignore[arg-type]
    step = build_step([Piece(s, 0, len(s.tokens)) for s in sequences], 16)
    draws = [Draw(s.params, s.seed, len(s.tokens)) for s in sequences]
    assert runner.choose(step, draws) == sampler.sample(runner.step(step), draws)
    assert runner.choose(build_step([Piece(sequences[0], 0, len(sequences[0].tokens) - 1)], 16), []) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_not_finite_ends_with_a_message(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoder, "sample", functools.partial(gpu_decoder.sample, chunk=128))
    llm, params = on_gpu(model("small")), SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature, seed=1)
    wanted = llm.generate([[3, 4, 5]], params)[0].token_ids
    head = gpu_decoder.GpuDecoder.logits

    def broken(self: GpuDecoder, step: StepInput) -> torch.Tensor:
        logits = head(self, step).clone()
        logits[-1, 9] = torch.nan
        return logits

    monkeypatch.setattr(GpuDecoder, "logits", broken)
    engine = llm.engine()
    good, bad = engine.add([3, 4, 5], params), engine.add([3, 7, 5], params)
    with pytest.raises(ModelError, match="not finite"):
        engine.step()
    monkeypatch.setattr(GpuDecoder, "logits", head)
    while engine.busy():
        engine.step()
    assert (good.generated, str(bad.finish_reason)) == (wanted, "cancelled")
