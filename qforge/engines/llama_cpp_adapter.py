"""Runs llama.cpp (the xllamacpp wheel) in an interpreter of its own: a request file in, log-probabilities and a JSON answer out. Standard library and xllamacpp only.

usage: python llama_cpp_adapter.py REQUEST.json
    request: {"model": path, "prompts": [[token id]], "vocab_size": V, "context": n, "threads": n, "exact": bool, "output": path}
    output:  float32 [len(prompts), V], raw; on stdout, last line, {"version": ..., "wall_s": ...} or {"error": ...}
"""

from __future__ import annotations

import array
import json
import sys
import time
from typing import Any

LOWEST = -80.0  # for a token that the server left out: below any probability that fp32 can tell from zero


def server(request: dict[str, Any]) -> Any:
    """llama.cpp's server inside this process, with the model loaded."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = request["context"]
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = request["threads"]
    params.cpuparams_batch.n_threads = request["threads"]
    params.verbosity = -1
    if request["exact"]:  # flash attention computes in fp16: 0.026 in log-probabilities on stories15M, against 2e-5 without it
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def next_token(running: Any, prompt: list[int], vocab_size: int) -> array.array[float]:
    """Log-probabilities `[V]` of the token after `prompt`."""
    # what is generated is forced to be a letter: the server gives no probabilities with a token that ends the text or half a character; those that it gives are unforced
    forced = {"n_predict": 1, "temperature": 0, "ignore_eos": True, "logit_bias": [["a", 1e6]]}
    answer = running.handle_completions({"prompt": prompt, "n_probs": vocab_size, "cache_prompt": False, **forced})
    answer = answer[0] if isinstance(answer, list) else answer
    if "choices" not in answer:
        raise RuntimeError(f"llama.cpp answered {str(answer)[:300]}")
    found = array.array("f", [LOWEST]) * vocab_size
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        found[entry["id"]] = max(entry["logprob"], LOWEST)
    return found


def main() -> None:
    """Answer one request."""
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    try:
        import xllamacpp

        started = time.monotonic()
        running = server(request)
        with open(request["output"], "wb") as out:
            for prompt in request["prompts"]:
                next_token(running, prompt, request["vocab_size"]).tofile(out)
        answer = {"version": f"xllamacpp {xllamacpp.__version__}", "wall_s": round(time.monotonic() - started, 3)}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
