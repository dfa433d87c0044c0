"""Measure a loaded model: prefill and decode speed, time to first token, time per token, and how much of the memory's bandwidth decoding uses. Prompts are seeded random tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from qforge.ops.native_module import context, missing
from qforge.runtime.engine import Engine
from qforge.runtime.llm import LLM
from qforge.runtime.sequence import SamplingParams

_REPEATS = 5
_FAR_BYTES = 512 << 20  # more than any last-level cache holds
_PREFILL = ((128, 1), (512, 1), (128, 8))
_BATCHES = (1, 8, 32)


def measure(llm: LLM, activations: str = "fp", bandwidth: float | None = None) -> dict[str, Any]:
    """The figures of `bench --json` that a loaded model gives: prefill, decode, ttft_ms, tpot_ms. Speeds are medians of repeated runs.

    Args:
        llm: the model.
        activations: what the rows are named after.
        bandwidth: bytes per second; decode rows then say which fraction of it the weights and the cache that a step reads amount to.
    """
    room = llm.max_context
    length = min(128, room // 2)
    steps = {batch: _decode(llm, batch, length) for batch in _BATCHES}
    first = [_timed(_prefill(llm, length, 1)) * 1e3 for _ in range(2 * _REPEATS)]
    return {
        "prefill": [{"tokens": n, "batch": b, "activations": activations, "tokens_per_second": n * b / _median(_prefill(llm, n, b))} for n, b in _PREFILL if n < room],
        "decode": [_row(llm, activations, b, length, statistics.median(s), bandwidth) for b, s in steps.items()],
        "ttft_ms": _percentiles(first),
        "tpot_ms": _percentiles([s * 1e3 for s in steps[1]]),
    }


def decode_speed(llm: LLM) -> float | None:
    """Tokens per second that one sequence gets after (at most) 128 others, by the median step; None where the context has no room for that."""
    seconds = statistics.median(_decode(llm, 1, min(128, llm.max_context // 2)))
    return 1 / seconds if seconds > 0 else None


def read_bandwidth(threads: int | None = None) -> float | None:
    """Bytes per second that all threads together read from memory, one after the other; the best of some runs. None without the native module."""
    if missing() is not None:
        return None
    native, words = context(threads), np.ones(_FAR_BYTES // 8, np.uint64)
    return float(words.nbytes / min(_timed(lambda: native.read(words.ctypes.data, len(words))) for _ in range(_REPEATS)))


def _row(llm: LLM, activations: str, batch: int, context_length: int, seconds: float, bandwidth: float | None) -> dict[str, Any]:
    cached = batch * context_length * llm.cache_token_bytes
    fraction = None if bandwidth is None else (llm.runner.weight_bytes() + cached) / seconds / bandwidth
    return {"batch": batch, "context": context_length, "activations": activations, "tokens_per_second": batch / seconds, "read_bandwidth_fraction": fraction}


def _prompt(llm: LLM, tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(llm.runner.spec.vocab_size), k=tokens)


def _prefill(llm: LLM, tokens: int, batch: int) -> Callable[[], None]:
    """From the requests' arrival to the last one's first token."""

    def run() -> None:
        engine = llm.engine(speculate=False)
        for i in range(batch):
            engine.add(_prompt(llm, tokens, i), SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.busy():
            engine.step()

    return run


def _decode(llm: LLM, batch: int, length: int) -> list[float]:
    """Seconds of each step in which `batch` sequences each get one token."""
    new = min(32, llm.max_context - length)
    engine = llm.engine(speculate=False)
    for i in range(batch):
        engine.add(_prompt(llm, length, i), SamplingParams(max_tokens=new + 1, ignore_eos=True))
    return [s for s, n in _steps(engine) if n == batch][1:] or [float("nan")]


def _steps(engine: Engine) -> list[tuple[float, int]]:
    taken = []
    while engine.busy():
        start = time.perf_counter()
        tokens = len(engine.step())
        taken.append((time.perf_counter() - start, tokens))
    return taken


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _median(run: Callable[[], None]) -> float:
    run()
    return statistics.median(_timed(run) for _ in range(_REPEATS))


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]}
