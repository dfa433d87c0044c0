"""The runtime on a GPU as far as it can be proved without one: the decoder in Triton's interpreter, recorded steps with a recorder that replays by calling, sizes, and refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import Replaying, replaying
from runtime_models import folder, model, prompts, quantized
from tolerances import GPU_LOGITS

from qforge import numerics
from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.ops.dense import DenseKernel
from qforge.ops.triton.cache import empty_cache
from qforge.qlinear import QuantizedLinear
from qforge.runtime import LLM, SamplingParams
from qforge.runtime.decode_graphs import DecodeGraphs, sizes
from qforge.runtime.gpu_batch import GpuBatch, moved
from qforge.runtime.gpu_cache import bytes_per_token, stored
from qforge.runtime.step import StepInput
from qforge.scheme import parse

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))
CPU = torch.device("cpu")


def test_the_decoder_agrees_with_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/runtime/gpu_interpreted.py"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 8


class Toy:
    """A model of one attention-like sum over a paged cache of numbers: logits say exactly which tokens, places and blocks were read."""

    def __init__(self, blocks: int, block_size: int, vocabulary: int = 5) -> None:
        self.cache, self.block_size, self.vocabulary = torch.zeros(blocks * block_size, dtype=torch.float64), block_size, vocabulary
        self.rows: list[int] = []

    def forward(self, b: GpuBatch) -> torch.Tensor:
        self.rows.append(len(b.tokens))
        kept = b.slots >= 0
        self.cache[b.slots[kept]] = (b.tokens * 7 + b.positions + 1)[kept].double()
        sums = []
        for s, length in enumerate(b.lengths.tolist()):
            place = torch.arange(length)
            slots = b.tables[s].long()[place // self.block_size] * self.block_size + place % self.block_size
            assert length <= b.longest_context
            sums.append((self.cache[slots] * (place + 1)).sum())
        mixed = torch.stack(sums)[torch.repeat_interleave(torch.arange(len(sums)), b.starts.diff())]
        return (mixed[:, None] + torch.arange(self.vocabulary)).float()


def steps(contexts: list[int], tables: np.ndarray, block_size: int, seed: int) -> StepInput:
    """A decode step of sequences that hold so many tokens, the new one included."""
    lens = np.array(contexts, np.int64)
    slots = tables[np.arange(len(lens)), (lens - 1) // block_size].astype(np.int64) * block_size + (lens - 1) % block_size
    tokens = np.random.default_rng(seed).integers(0, 50, len(lens))
    used = -(-int(lens.max()) // block_size)
    longs = [array("q", a.tolist()) for a in (tokens, lens - 1, slots, lens, np.arange(len(lens)))]
    return StepInput(*longs[:3], array("i", tables[:, :used].ravel().tolist()), array("i", range(len(lens) + 1)), *longs[3:])


@settings(max_examples=40, deadline=None)
@given(most=st.integers(1, 9), seed=st.integers(0, 2**31), counts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_recorded_steps_equal_plain_ones_and_write_nothing_else(most: int, seed: int, counts: list[int]) -> None:
    block_size, width = 4, 3
    draw = np.random.default_rng(seed)
    blocks = most * width
    recorded, plain = Toy(blocks, block_size), Toy(blocks, block_size)
    graphs = DecodeGraphs(recorded.forward, CPU, most, width, width * block_size, recorded.vocabulary, replaying)
    assert not recorded.cache.any()  # recording leaves no trace
    for i, count in enumerate(counts):
        count = min(count, most)
        tables = draw.permutation(blocks).astype(np.int32).reshape(most, width)[:count]
        step = steps(draw.integers(1, width * block_size + 1, count).tolist(), tables, block_size, seed + i)
        got = graphs.logits(step)
        assert got is not None
        assert torch.equal(got, plain.forward(moved(step, CPU)))
        assert torch.equal(recorded.cache, plain.cache)
        assert recorded.rows[-1] == next(n for n in graphs.sizes if n >= count)


def test_what_a_recorded_step_reads_is_kept() -> None:
    """A graph keeps addresses, not tensors: what was made for it and then let go is somebody else's memory when it is replayed."""
    read: list[weakref.ref[torch.Tensor]] = []

    def forward(b: GpuBatch) -> torch.Tensor:
        read.extend(weakref.ref(t if t._base is None else t._base) for t in (b.tokens, b.slots, b.tables, b.starts))
        return torch.zeros(len(b.tokens), 5)

    def forgetful(run: Callable[[], None]) -> Replaying:
        run()
        return Replaying(lambda: None)

    graphs = DecodeGraphs(forward, CPU, 2, 3, 12, 5, forgetful)
    assert len(read) == 4 * len(graphs.sizes)
    assert all(t() is not None for t in read)


def test_only_decode_steps_that_fit_are_recorded() -> None:
    toy = Toy(6, 4)
    graphs = DecodeGraphs(toy.forward, CPU, 2, 3, 12, toy.vocabulary, replaying)
    tables = np.arange(6, dtype=np.int32).reshape(2, 3)
    one = steps([3, 7], tables, 4, 0)
    assert graphs.logits(one) is not None
    wide = steps([3, 7, 2], np.arange(9, dtype=np.int32).reshape(3, 3), 4, 0)
    assert graphs.logits(wide) is None
    cut = StepInput(
        one.tokens, one.positions, one.slot_mapping, one.block_tables, one.query_starts, one.context_lens, array("q", [1])
    )  # a piece of a prompt: its logits are not wanted
    assert graphs.logits(cut) is None


@given(most=st.integers(1, 1000))
def test_sizes_waste_less_than_half_or_16_rows(most: int) -> None:
    found = sizes(most)
    assert list(found) == sorted(set(found))
    assert found[-1] == most
    for count in range(1, most + 1):
        size = next(n for n in found if n >= count)
        assert size < max(2 * count, count + 16)
    assert sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)


@pytest.mark.parametrize("kind", ["fp16", "int8", "fp8", None])
def test_a_cache_takes_the_bytes_that_are_reckoned(kind: str | None) -> None:
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind or "", torch.bfloat16)
    cache = empty_cache(3, 16, 2, 24, dtype, "cpu")
    held = sum(t.nbytes for t in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if t is not None)
    assert held == 3 * 16 * bytes_per_token(dtype, 2, 24)
    if kind in ("fp16", None):
        assert stored(kind, torch.bfloat16, CPU) is torch.bfloat16


@pytest.mark.parametrize("text", ["nf4-g16", "int8-g32-asym", "fp8-e4m3-channel+fp8-e4m3-tensor-static", "int8-channel-sym+int8-token"])
@pytest.mark.parametrize("wide", [False, True])
def test_what_no_kernel_runs_is_multiplied_dequantized(text: str, wide: bool) -> None:
    scheme = parse(text)
    weight, x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)), torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).half()
    q = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme), bias=torch.randn(24))
    if scheme.activations is not None and scheme.activations.static:
        q = QuantizedLinear(q.scheme, q.codes, q.scales, q.zeros, input_scale=torch.tensor(0.01), bias=q.bias)
    kernel = DenseKernel(torch.float16, wide)
    y, want = kernel.run(x, kernel.prepack(q)), numerics.linear(x.float(), q)
    assert y.dtype == (torch.float32 if wide else torch.float16)
    assert (y - want).norm() / want.norm() < 2e-3


@pytest.mark.parametrize("number", ["nf4-g16", "mxfp4", "nvfp4", "int4-g16-asym", "fp8-e4m3-channel"])
def test_weights_are_rounded_and_restored_where_they_lie(number: str) -> None:
    """On a device that only knows shapes: an operation between it and the processor would raise."""
    scheme = parse(number)
    weight, scales = torch.randn(8, 64, device="meta"), torch.ones(scheme.scale_shape(8, 64), device="meta")
    zeros = torch.zeros(scales.shape, dtype=torch.uint8, device="meta") if "asym" in number else None
    q = numerics.quantize(weight, scheme, scales, zeros)
    assert numerics.dequantize(q).is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("scheme", ["int4-g32-asym", "int8-channel-sym+int8-token", None])
def test_a_gpu_gives_the_tokens_and_logits_of_the_processor(scheme: str | None, graphs: bool) -> None:
    of, _ = quantized("llama", lambda n: scheme)
    here, there = LLM(of), LLM(of, device="cuda", max_num_seqs=5, max_step_tokens=13, num_blocks=40, graphs=graphs)
    window = prompts(1, 60, seed=6)[0] * 3
    want, got = (torch.cat(list(llm.score([window]))) for llm in (here, there))
    rounded = scheme is not None and "+" in scheme
    assert (got - want).norm() / want.norm() < GPU_LOGITS["rounded activations" if rounded else "fp16"]
    given_ = prompts(9, 40, seed=1)
    outputs = [llm.generate(given_, SamplingParams(max_tokens=12)) for llm in (here, there)]
    agree = [a.token_ids == b.token_ids for a, b in zip(*outputs, strict=True)]
    assert sum(agree) >= (5 if rounded else 8)  # a tie may fall the other way


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none")
def test_two_gpus_give_the_logits_of_one() -> None:
    one, two = (LLM(folder("llama"), device="cuda", tensor_parallel=n, num_blocks=40, max_num_seqs=4) for n in (1, 2))
    window = prompts(1, 60, seed=6)[0] * 3
    want, got = (torch.cat(list(llm.score([window]))) for llm in (one, two))
    assert (got - want).norm() / want.norm() < GPU_LOGITS["fp16"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"device": "cuda"}, MissingCapabilityError, "torch finds no NVIDIA GPU here; use cpu"),
        ({"device": "cuda:3"}, MissingCapabilityError, "torch finds no NVIDIA GPU"),
        ({"device": "cuda:x"}, UnsupportedError, "use cpu, cuda or cuda:N"),
        ({"device": "rocm"}, UnsupportedError, "use cpu, cuda or cuda:N"),
        ({"device": "cuda", "activations": "int8"}, UnsupportedError, "on a GPU they have 16 bits"),
        ({"kv_cache": "fp4"}, UnsupportedError, "not known on a processor; use one of fp32, fp16, bf16, int8, fp8"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_weights_are_read(how: dict[str, str], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LLM(model("llama"), **how)  # type: ignore[arg-type]


def test_a_cache_of_fp32_is_not_kept_on_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="not kept on a GPU; use one of fp16, int8, fp8"):
        stored("fp32", torch.float16, CPU)
