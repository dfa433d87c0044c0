"""Measure a loaded model: prefill and decode speed, time to first token, time per token. Prompts are seeded random tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from qforge.runtime.engine import Engine
from qforge.runtime.llm import LLM
from qforge.runtime.sequence import SamplingParams

_REPEATS = 5


def measure(llm: LLM, activations: str = "fp") -> dict[str, Any]:
    """The figures of `bench --json` that a loaded model gives: prefill, decode, ttft_ms, tpot_ms. Speeds are medians of repeated runs."""
    room = llm.max_context
    prefill = [{"tokens": n, "batch": 1, "activations": activations, "tokens_per_second": n / _median(_prefill(llm, n))} for n in (128, 512) if n < room]
    context = min(128, room // 2)
    steps = {batch: _decode(llm, batch, context) for batch in (1, 8, 32)}
    decode = [{"batch": b, "context": context, "activations": activations, "tokens_per_second": b / statistics.median(s)} for b, s in steps.items()]
    first = [_timed(_prefill(llm, context)) * 1e3 for _ in range(2 * _REPEATS)]
    each = [s * 1e3 for s in steps[1]]
    return {"prefill": prefill, "decode": decode, "ttft_ms": _percentiles(first), "tpot_ms": _percentiles(each)}


def with_speed(figures: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Figures, and the prefill and decode speed of others (measured with other activations)."""
    return figures | {kind: figures[kind] + other[kind] for kind in ("prefill", "decode")}


def _prompt(llm: LLM, tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(llm.runner.spec.vocab_size), k=tokens)


def _prefill(llm: LLM, tokens: int) -> Callable[[], None]:
    """From a request's arrival to its first token."""

    def run() -> None:
        engine = llm.engine()
        engine.add(_prompt(llm, tokens, 0), SamplingParams(max_tokens=1, ignore_eos=True))
        while engine.busy():
            engine.step()

    return run


def _decode(llm: LLM, batch: int, context: int) -> list[float]:
    """Seconds of each step in which `batch` sequences each get one token."""
    new = min(32, llm.max_context - context)
    engine = llm.engine()
    for i in range(batch):
        engine.add(_prompt(llm, context, i), SamplingParams(max_tokens=new + 1, ignore_eos=True))
    return [s for s, n in _steps(engine) if n == batch][1:] or [float("nan")]


def _steps(engine: Engine) -> list[tuple[float, int]]:
    taken = []
    while engine.busy():
        start = time.perf_counter()
        tokens = len(engine.step())
        taken.append((time.perf_counter() - start, tokens))
    return taken


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _median(run: Callable[[], None]) -> float:
    run()
    return statistics.median(_timed(run) for _ in range(_REPEATS))


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]}
