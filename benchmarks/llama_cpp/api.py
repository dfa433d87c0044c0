"""Times one sequence through llama.cpp's C API (llama-cpp-python): no sampling, no logits copied. A request file in, JSON out (the last line).

Standard library and llama_cpp only.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp as api


def run(context: Any, tokens: list[int]) -> float:
    """Seconds of one batch."""
    start = time.perf_counter()
    ids = (api.llama_token * len(tokens))(*tokens)
    if api.llama_decode(context, api.llama_batch_get_one(ids, len(tokens))) != 0:
        raise RuntimeError("llama_decode failed")
    api.llama_synchronize(context)
    return time.perf_counter() - start


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    api.llama_backend_init()
    quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(quiet, None)
    model = api.llama_model_load_from_file(request["gguf"].encode(), api.llama_model_default_params())
    p = api.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_threads, p.n_threads_batch = 1024, 512, 512, request["threads"], request["threads"]
    context = api.llama_init_from_model(model, p)
    best = {"prefill": 0.0, "decode": 0.0}
    for _ in range(request["repeats"]):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        best["prefill"] = max(best["prefill"], len(request["single"]["prompt"]) / run(context, request["single"]["prompt"]))
        api.llama_memory_clear(api.llama_get_memory(context), True)
        run(context, request["short"]["prompt"])
        new = request["short"]["output"] - 1
        best["decode"] = max(best["decode"], new / sum(run(context, [100 + i]) for i in range(new)))
    print("\n" + json.dumps({"version": f"llama-cpp-python {api.__version__}", **best}), flush=True)


if __name__ == "__main__":
    main()
