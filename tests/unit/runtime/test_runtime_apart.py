"""Threads that are far from each other compute sequences of their own: the same bits, and when they do."""

from __future__ import annotations

import os
import time
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from runtime_models import model, prompts, quantized

from qforge.models.model import Model
from qforge.ops.native_module import instruction_sets, module
from qforge.runtime import LLM, SamplingParams, native_decoder
from qforge.runtime.native_decoder import NativeDecoder
from qforge.runtime.step import StepInput

BLOCK, REACH = 16, 4  # blocks of a sequence


def runtime(of: Model, threads: int, far_ns: float, kv_cache: str = "int8") -> LLM:
    with mock.patch.object(native_decoder, "FAR_NS", far_ns):
        return LLM(of, activations="int8" if of.schemes else "fp", threads=threads, kv_cache=kv_cache, num_blocks=32 * REACH)


def steps_apart(llm: LLM) -> int:
    assert isinstance(llm.runner, NativeDecoder)
    return int(llm.runner._decoder.steps_apart)


def step(seed: int, rows_of: list[int], wanted: list[int], reach: int = REACH) -> StepInput:
    """A step of sequences that have so many rows each, from random positions on (blocks before are as the cache has them: zeros)."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(rows_of)]).astype(np.int32)
    tables = rng.permutation(32 * REACH)[: len(rows_of) * reach].reshape(-1, reach).astype(np.int32)
    positions = np.concatenate([rng.integers(BLOCK * (reach - REACH), BLOCK * reach - n + 1) + np.arange(n) for n in rows_of]).astype(np.int64)
    slots = np.concatenate([tables[s][positions[a:b] // BLOCK] * BLOCK + positions[a:b] % BLOCK for s, (a, b) in enumerate(pairwise(starts))]).astype(np.int64)
    lens = (positions[starts[1:] - 1] + 1).astype(np.int32)
    tokens = rng.integers(0, 100, len(positions)).astype(np.int64)
    return StepInput(longs(tokens), longs(positions), longs(slots), ints(tables), ints(starts), longs(lens), array("q", wanted))


def longs(values: np.ndarray) -> array[int]:
    return array("q", values.tolist())


def ints(values: np.ndarray) -> array[int]:
    return array("i", values.ravel().tolist())


CASES: dict[str, tuple[int, list[int], bool]] = {  # threads, rows of sequences, whether threads have enough of their own
    "one row each": (2, [1] * 8, True),
    "an odd number": (2, [1] * 13, True),
    "guesses": (2, [3, 1, 9, 1, 1, 4, 2, 9, 1, 1, 1], True),
    "three threads": (3, [1, 2, 1, 1, 3, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1], True),
    "too few rows": (2, [1] * 7, False),
    "too few rows for three": (3, [1] * 17, False),
    "a prompt": (2, [17, *[1] * 17], False),
    "one sequence has most of the rows": (2, [9, 1, 1, 1], False),
}


@pytest.mark.parametrize("kv_cache", ["int8", "fp32"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_all_threads_together(case: str, name: str, kv_cache: str) -> None:
    threads, rows_of, enough = CASES[case]
    of = quantized("llama", lambda _: "int4-g32-asym", head="int8-g32-sym")[0] if name == "int4" else model(name)
    together, apart = (runtime(of, threads, far_ns, kv_cache) for far_ns in (1e9, -1.0))
    for seed in range(3):
        wanted = sorted(np.random.default_rng(seed).choice(sum(rows_of), size=max(1, sum(rows_of) - seed * 3), replace=False).tolist())
        given = step(seed, rows_of, wanted)
        expected, found = together.runner.step(given), apart.runner.step(given)
        assert found.isfinite().all()
        assert (found == expected).all()
    assert (steps_apart(together), steps_apart(apart)) == (0, 3 if enough else 0)


def test_tokens_are_the_same_and_a_sequence_alone_has_all_threads() -> None:
    of, given = model("llama"), prompts(12, 20, seed=3)
    together, apart = (runtime(of, 2, far_ns) for far_ns in (1e9, -1.0))
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=1, ignore_eos=True)
    assert [o.token_ids for o in apart.generate(given, params)] == [o.token_ids for o in together.generate(given, params)]
    assert steps_apart(apart) > 0
    before = steps_apart(apart)
    apart.generate(given[:1], params)
    assert steps_apart(apart) == before


def test_positions_may_grow() -> None:
    together, apart = (runtime(model("llama"), 2, far_ns) for far_ns in (1e9, -1.0))
    for reach in (4, 8, 16, 12):  # the tables of cosines have 256 positions, and others lie elsewhere
        given = step(reach, [1] * 8, list(range(8)), reach)
        assert (together.runner.step(given) == apart.runner.step(given)).all()
    assert steps_apart(apart) == 4


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_an_exchange_decides_and_a_thread_without_a_core_has_its_work_done_by_others() -> None:
    llm = runtime(model("llama"), 2, 0.0)
    given = step(0, [1] * 8, list(range(8)))
    llm.runner.step(given)
    assert steps_apart(llm) == 0, "nothing is known before the first step"
    end = time.monotonic() + 20
    while steps_apart(llm) == 0 and time.monotonic() < end:
        llm.runner.step(given)
    assert steps_apart(llm) > 0
    cores = os.sched_getaffinity(0)
    threads = [int(t.name) for t in Path("/proc/self/task").iterdir()]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, {min(cores)})  # an exchange takes two cores
        for _ in range(30):
            llm.runner.step(given)
        before = steps_apart(llm)
        for _ in range(10):
            llm.runner.step(given)
        assert steps_apart(llm) == before
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_after_an_uneven_step_threads_help_each_other() -> None:
    """The second thread's sequences have a thousand times the keys of the first one's."""
    with mock.patch.object(native_decoder, "FAR_NS", 0.0):
        llm = LLM(model("llama"), threads=2, num_blocks=4 * 512 + 4, kv_cache="fp32")
    given = step(0, [1] * 8, list(range(8)))
    tables = np.zeros((8, 512), np.int32)
    tables[:4, 0], tables[4:] = range(4), 4 + np.arange(4 * 512).reshape(4, 512)
    positions = np.array([0] * 4 + [BLOCK * 512 - 1] * 4, np.int64)
    slots = np.array([BLOCK * t[p // BLOCK] + p % BLOCK for t, p in zip(tables, positions, strict=True)], np.int64)
    given = replace(given, positions=longs(positions), slot_mapping=longs(slots), block_tables=ints(tables), context_lens=longs(positions + 1))
    gaps: list[int] = []  # steps from each one that was apart to the next
    steps, end = 0, time.monotonic() + 60
    while max(gaps, default=0) <= 16 and len(gaps) < 200 and time.monotonic() < end:
        before = steps_apart(llm)
        llm.runner.step(given)
        steps += 1
        if steps_apart(llm) > before:
            gaps += [steps] if before else []
            steps = 0
    assert max(gaps, default=0) > 16, "16 together after one that was uneven; not after each: other processes may make both threads slow"


def test_an_exchange_takes_nanoseconds_and_one_thread_has_none() -> None:
    native = module()
    one, two = (native.Context(threads, instruction_sets()[-1]) for threads in (1, 2))
    assert one.exchange() == 0
    end = time.monotonic() + 20
    while (took := two.exchange()) == 0 and time.monotonic() < end:
        pass  # the other thread has no core at this moment
    assert 8 < took < 1e5, "no line travels faster"


@pytest.mark.parametrize(("vendor", "limit"), [("GenuineIntel", float("inf")), ("AuthenticAMD", 190.0)])
def test_no_intel_processor_computes_apart(tmp_path: Path, vendor: str, limit: float) -> None:
    """An exchange takes a Xeon long, too, and its loads longer."""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 6\n")
    with mock.patch.object(native_decoder, "Path", return_value=tmp_path / "cpuinfo"):
        assert native_decoder._far_ns() == limit
    with mock.patch.object(native_decoder, "Path", return_value=tmp_path / "none"):
        assert native_decoder._far_ns() == 190
