"""Times llama.cpp's server (the xllamacpp wheel, in this process): a request file in, JSON out (the last line). Standard library and xllamacpp only.

Where the request says `served`, JSON out for each word on stdin (`load.serve`), of one sequence.
One sequence: the server's own clock, which leaves out its HTTP and text. Many: when each token reached the caller.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import xllamacpp
from load import Timeline, best, serve

GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "samplers": ["temperature"]}


def server(request: dict[str, Any], slots: int, context: int) -> Any:
    """A server with so many slots of so many tokens each; 16-bit cache and flash attention as it chooses."""
    p = xllamacpp.CommonParams()
    p.model.path = request["gguf"]
    p.n_parallel, p.n_ctx, p.n_gpu_layers, p.warmup, p.verbosity = slots, slots * context, 0, True, -1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = request["threads"]
    return xllamacpp.Server(p)


def ask(running: Any, one: dict[str, Any]) -> dict[str, Any]:
    """A whole completion."""
    answer = running.handle_completions({"prompt": one["prompt"], "n_predict": one["output"], **GREEDY})
    answer = answer[0] if isinstance(answer, list) else answer
    if "timings" not in answer:
        raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")
    found: dict[str, Any] = answer
    return found


def all_at_once(running: Any, requests: list[dict[str, Any]]) -> Timeline:
    """Each request in a thread of its own, streamed."""
    came: Timeline = [[] for _ in requests]
    start = time.perf_counter()

    def one(number: int, r: dict[str, Any]) -> None:
        def take(chunk: Any) -> bool:
            came[number].append(time.perf_counter() - start)
            return False

        running.handle_completions({"prompt": r["prompt"], "n_predict": r["output"], "stream": True, **GREEDY}, take)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(requests)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    # what ends a stream, or holds half a character back, brings no token: the count is what was asked for
    return [[t[0], *t[1 : r["output"] - 1], t[-1]][: r["output"]] + [t[-1]] * max(0, r["output"] - len(t)) for t, r in zip(came, requests, strict=True)]


def clocked(running: Any, one: dict[str, Any]) -> Timeline:
    """One completion by the server's own clock."""
    rate = ask(running, one)["timings"]["predicted_per_second"]
    return [[n / rate for n in range(one["output"])]]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    answer: dict[str, Any] = {"version": f"xllamacpp {xllamacpp.__version__}"}
    if request.get("served"):
        running = server(request, 1, 1024)
        serve(answer, lambda requests, _: (clocked(running, requests[0]), []), request)
        return
    if request["repeats"]:
        running = server(request, 1, 1024)
        answer["prefill"] = max(ask(running, request["single"])["timings"]["prompt_per_second"] for _ in range(request["repeats"]))
        answer["decode"] = max(ask(running, request["short"])["timings"]["predicted_per_second"] for _ in range(request["repeats"]))
        del running
    if request["mixed"]:
        slots = server(request, len(request["mixed"]), 768)
        answer["mixed"] = best(all_at_once(slots, request["mixed"]) for _ in range(request["loads"]))
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
