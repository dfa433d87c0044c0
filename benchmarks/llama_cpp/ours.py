"""Times qforge's runtime: a request file, then words on stdin, JSON out for each. See benchmarks/vs_llama_cpp.py for what is timed."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from load import Timeline, serve

from qforge import __version__
from qforge.runtime import LLM, SamplingParams


def timed_steps(llm: LLM, requests: list[dict[str, Any]], *, speculate: bool) -> tuple[Timeline, list[list[int]]]:
    """All requests at once; when each of their tokens came, and the tokens."""
    engine = llm.engine(speculate=speculate, prefix_cache=False)
    start = time.perf_counter()
    for r in requests:
        engine.add(r["prompt"], SamplingParams(max_tokens=r["output"], ignore_eos=True))
    came: Timeline = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.busy():
        chosen = engine.step()
        now = time.perf_counter() - start
        for sequence, token in chosen:
            came[sequence.id].append(now)
            tokens[sequence.id].append(token)
    return came, tokens


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    llm = LLM(request["model"], activations=request["activations"], threads=request["threads"], kv_cache=request["kv_cache"])
    about = {"version": f"qforge {__version__}", "kernels": llm.kernels(), "weight_bytes": llm.runner.weight_bytes(), "loads": ["mixed", "lookup"]}
    serve(about, lambda requests, lookup: timed_steps(llm, requests, speculate=lookup), request)


if __name__ == "__main__":
    main()
