"""The requests that every engine is given, and what is said of when their tokens came. Standard library only: foreign interpreters import it."""

from __future__ import annotations

import json
import random
import statistics
import sys
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


def serve(about: dict[str, Any], run: Callable[[list[dict[str, Any]], bool], tuple[Timeline, list[list[int]]]], request: dict[str, Any]) -> None:
    """Print what an engine is, then a line for each word on stdin: `single` and `short` of `request` by themselves, its `mixed` requests at once, or these with prompt `lookup`.

    `run` takes requests that come at once, and whether to look up, and returns when tokens came, and the tokens. `ends`: of steps that chose tokens, seconds from the start.
    """
    print("\n" + json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = line.strip()
        came, tokens = run(request["mixed"] if asked in ("mixed", "lookup") else [request[asked]], asked == "lookup")
        first = came[0]
        if asked == "single":
            found: dict[str, Any] = {"prefill": len(request["single"]["prompt"]) / first[0]}
        elif asked == "short":
            found = {"decode": (len(first) - 1) / (first[-1] - first[0])}
        else:
            found = summary(came) | {"ends": sorted({t for one in came for t in one}), "tokens": tokens}
        print("\n" + json.dumps(found), flush=True)
