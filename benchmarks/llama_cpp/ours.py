"""Times qforge's runtime: a request file in, JSON out (the last line). See benchmarks/vs_llama_cpp.py for what is timed."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from load import Timeline, best, looked_up

from qforge import __version__
from qforge.runtime import LLM, SamplingParams


def timed_steps(llm: LLM, requests: list[dict[str, Any]], *, speculate: bool = False) -> tuple[Timeline, list[list[int]]]:
    """All requests at once; when each of their tokens came, and the tokens."""
    engine = llm.engine(speculate=speculate)
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
    answer: dict[str, Any] = {"version": f"qforge {__version__}", "kernels": llm.kernels()}
    single = [timed_steps(llm, [request["single"]])[0][0] for _ in range(request["repeats"])]
    if single:
        answer["prefill"] = max(len(request["single"]["prompt"]) / t[0] for t in single)
        answer["decode"] = max((len(t) - 1) / (t[-1] - t[0]) for t in [timed_steps(llm, [request["short"]])[0][0] for _ in range(request["repeats"])])
    if request["mixed"]:
        plain = [timed_steps(llm, request["mixed"]) for _ in range(max(1, request["repeats"]))]
        answer["mixed"] = best(came for came, _ in plain)
        if request.get("lookup"):
            answer |= looked_up(plain[0], [timed_steps(llm, request["mixed"], speculate=True) for _ in plain])
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
