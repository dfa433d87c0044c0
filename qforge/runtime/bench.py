"""Measure a loaded model: prefill and decode speed, time to first token, time per token, and how much of the memory's bandwidth decoding uses. Prompts are seeded random tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from qforge.runtime.engine import Engine
from qforge.runtime.llm import LLM
from qforge.runtime.read_speed import cache_note
from qforge.runtime.sequence import SamplingParams

_REPEATS = 5
_PREFILL = ((128, 1), (512, 1), (128, 8))
_BATCHES = (1, 8, 32)
_CONTEXT, _NEW = 128, 32  # tokens of a sequence whose steps are timed: before, and while


def measure(llm: LLM, activations: str = "fp") -> dict[str, Any]:
    """The figures of `bench --json` that a loaded model gives: prefill, decode, ttft_ms, tpot_ms. Speeds are medians of repeated runs.

    Sequences have contexts of 128 tokens, or of what the model and the cache have room for; batches that do not fit are left out.

    Args:
        llm: the model.
        activations: what the rows are named after.
    """
    lengths = {batch: length for batch in _BATCHES if (length := _length(llm, batch)) > 0}
    steps = {batch: taken for batch, length in lengths.items() if (taken := _decode(llm, batch, length))}
    length = max(1, _length(llm, 1))
    most = min(llm.max_context, _room(llm, 1))
    named = {"activations": activations, "prompt_tokens": length}
    first = [_timed(_prefill(llm, length, 1)) * 1e3 for _ in range(2 * _REPEATS)]
    return {
        "prefill": [{"tokens": n, "batch": b, "activations": activations, "tokens_per_second": n * b / _median(_prefill(llm, n, b))} for n, b in _PREFILL if n < most],
        "decode": [_row(llm, activations, b, lengths[b], statistics.median(taken)) for b, taken in steps.items()],
        "ttft_ms": {**named, **_percentiles(first)},
        "tpot_ms": {**named, **_percentiles([s * 1e3 for s in steps[1]])} if 1 in steps else None,
    }


def decode_speed(llm: LLM) -> float | None:
    """Tokens per second that one sequence gets after (at most) 128 others, by the median step; None where there is no room for that."""
    length = _length(llm, 1)
    taken = _decode(llm, 1, length) if length > 0 else []
    return 1 / statistics.median(taken) if taken else None


def beside_bandwidth(row: dict[str, Any], bandwidth: float | None) -> dict[str, Any]:
    """A row of `decode` with the fraction of the bandwidth (bytes per second) at which a step reads weights and cache, and with what is to be known of it (`cache_note`)."""
    if bandwidth is None:
        return {**row, "read_bandwidth_fraction": None, "read_bandwidth_note": None}
    read = row["weight_bytes"] + row["cache_bytes"]
    return {**row, "read_bandwidth_fraction": read * row["tokens_per_second"] / row["batch"] / bandwidth, "read_bandwidth_note": cache_note(row["weight_bytes"])}


def _row(llm: LLM, activations: str, batch: int, context_length: int, seconds: float) -> dict[str, Any]:
    return {
        "batch": batch, "context": context_length, "activations": activations, "tokens_per_second": batch / seconds,
        "weight_bytes": llm.runner.weight_bytes(), "cache_bytes": batch * context_length * llm.cache_token_bytes,
    }  # fmt: skip


def _prompt(llm: LLM, tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(llm.runner.spec.vocab_size), k=tokens)


def _prefill(llm: LLM, tokens: int, batch: int) -> Callable[[], None]:
    """From the requests' arrival to the last one's first token."""

    def run() -> None:
        engine = llm.engine(speculate=False, prefix_cache=False)
        for i in range(batch):
            engine.add(_prompt(llm, tokens, i), SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.busy():
            engine.step()

    return run


def _room(llm: LLM, batch: int) -> int:
    """Tokens that the cache holds of each of so many sequences."""
    return llm.num_blocks // batch * llm.block_size


def _length(llm: LLM, batch: int) -> int:
    """Tokens before those that are timed, of each of so many sequences; 0 where they do not fit."""
    return max(0, min(_CONTEXT, llm.max_context // 2, _room(llm, batch) - _NEW - 1))


def _decode(llm: LLM, batch: int, length: int) -> list[float]:
    """Seconds of each step in which `batch` sequences each get one token."""
    new = min(_NEW, llm.max_context - length)
    engine = llm.engine(speculate=False, prefix_cache=False)
    for i in range(batch):
        engine.add(_prompt(llm, length, i), SamplingParams(max_tokens=new + 1, ignore_eos=True))
    return [s for s, n in _steps(engine) if n == batch][1:]


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
