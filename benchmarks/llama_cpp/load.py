"""The requests that every engine is given, and what is said of when their tokens came. Standard library only: foreign interpreters import it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from typing import Any

Timeline = list[list[float]]  # of each request, seconds from the start until each of its tokens


def mixed(count: int, vocabulary: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests that come at once: prompts of 32 to 512 tokens, outputs of 16 to 256, both uniform."""
    rng = random.Random(seed)
    sizes = [(rng.randint(32, 512), rng.randint(16, 256)) for _ in range(count)]
    return [{"prompt": rng.choices(range(100, vocabulary), k=prompt), "output": output} for prompt, output in sizes]


def summary(came: Timeline) -> dict[str, float]:
    """Output tokens per second of the whole load; time to first token and mean time per further token of a request, at p50 and p99, milliseconds."""
    first = sorted(t[0] * 1e3 for t in came)
    each = sorted((t[-1] - t[0]) / (len(t) - 1) * 1e3 for t in came if len(t) > 1)
    found = {"tokens_per_second": sum(map(len, came)) / max(t[-1] for t in came)}
    for name, values in (("ttft_ms", first), ("tpot_ms", each)):
        found |= {f"{name}_p50": statistics.median(values), f"{name}_p99": values[round(0.99 * (len(values) - 1))]}
    return found


def best(runs: Iterable[Timeline]) -> dict[str, float]:
    """Of the same load run several times, the fastest: the first one pays for memory that an engine touches for the first time."""
    return max(map(summary, runs), key=lambda s: s["tokens_per_second"])


def looked_up(plain: tuple[Timeline, list[list[int]]], runs: list[tuple[Timeline, list[list[int]]]]) -> dict[str, Any]:
    """The load with prompt lookup, and how many of its continuations that changed."""
    return {"lookup": best(came for came, _ in runs), "changed": sum(a != b for a, b in zip(plain[1], runs[0][1], strict=True))}


def figures(run: Callable[[list[dict[str, Any]]], Timeline], request: dict[str, Any]) -> dict[str, Any]:
    """What a batching engine is timed by, the best of several times each: `run` gives it requests at once."""
    repeats = range(request["repeats"])
    single, short = ([run([request[name]])[0] for _ in repeats] for name in ("single", "short"))
    return {
        "prefill": max(len(request["single"]["prompt"]) / t[0] for t in single),
        "decode": max((len(t) - 1) / (t[-1] - t[0]) for t in short),
        "mixed": best(run(request["mixed"]) for _ in repeats),
    }
