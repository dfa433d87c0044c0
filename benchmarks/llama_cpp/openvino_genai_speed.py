"""Times OpenVINO GenAI's continuous batching: a request file, then words on stdin, JSON out for each. See benchmarks/vs_openvino.py; needs openvino-genai and numpy."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from load import Timeline, serve

LIMITS = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else {}
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # of 3 and 5 guesses, 5 were faster


def pipeline(folder: str, threads: int, *, lookup: bool = False) -> Any:
    """Chunked prefill of 512 tokens a step, the plugin's own choice of precisions. It chooses by CPUID: told to use AVX2 only, it must also be told what it would choose then."""
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse, scheduler.cache_size, scheduler.enable_prefix_caching = 512, True, 2, False
    how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"} | LIMITS | ({"prompt_lookup": True} if lookup else {})
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", how)


def timed_steps(pipe: Any, requests: list[dict[str, Any]], *, lookup: bool) -> tuple[Timeline, list[list[int]]]:
    """All requests at once; when each of their tokens came, and the tokens."""
    start = time.perf_counter()
    handles = []
    for i, r in enumerate(requests):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = r["output"], True, False
        for name, value in LOOKUP.items() if lookup else ():
            setattr(config, name, value)
        handles.append(pipe.add_request(i, ov.Tensor(np.array([r["prompt"]], np.int64)), config))
    came: Timeline = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    while pipe.has_non_finished_requests():
        pipe.step()
        now = time.perf_counter() - start
        for i, handle in enumerate(handles):
            while handle.can_read():
                new = [token for o in handle.read().values() for token in o.generated_ids]
                came[i] += [now] * len(new)
                tokens[i] += new
    assert [len(c) for c in came] == [r["output"] for r in requests]
    return came, tokens


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    pipes = {lookup: pipeline(request["other"], request["threads"], lookup=lookup) for lookup in (False, True)}
    chosen = {name: LIMITS.get(name) or ov.Core().get_property("CPU", name) for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")}
    told = ", ".join(f"{name.lower()} {kind.get_type_name()}" for name, kind in chosen.items())
    about = {"version": f"openvino-genai {genai.__version__}", "precisions": told, "loads": ["mixed", "lookup"]}
    serve(about, lambda requests, lookup: timed_steps(pipes[lookup], requests, lookup=lookup), request)


if __name__ == "__main__":
    main()
