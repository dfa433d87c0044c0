"""From nothing to a first token through llama.cpp (the xllamacpp wheel): file, prompt, -, threads, rounds -> JSON (see benchmarks/startup.py). No warm-up."""

import os
import sys

import xllamacpp
from starting import tell

MODEL, PROMPT, _, THREADS, ROUNDS = sys.argv[1:]


def ask(running: object) -> None:
    answer = running.handle_completions({"prompt": PROMPT, "n_predict": 1, "temperature": 0, "cache_prompt": False})  # type: ignore[attr-defined]
    answer = answer[0] if isinstance(answer, list) else answer
    if "timings" not in answer and "content" not in answer and "choices" not in answer:
        raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")


def start() -> object:
    p = xllamacpp.CommonParams()
    p.model.path = MODEL
    p.n_parallel, p.n_ctx, p.n_gpu_layers, p.warmup, p.verbosity = 1, 1024, 0, False, -1
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(THREADS)
    running = xllamacpp.Server(p)
    ask(running)
    return running


tell(start, ask, int(ROUNDS))
os._exit(0)  # its threads take a second to end
