"""Runs llama.cpp (the xllamacpp wheel) in an interpreter of its own: a request file in, values and a JSON answer out. Standard library and xllamacpp only.

usage: python llama_cpp_adapter.py REQUEST.json
    request: {"model": path, "prompts": [[token id]], "vocab_size": V, "context": n, "threads": n, "exact": bool, "output": path}
    output:  float32 [len(prompts), V], raw; on stdout, last line, {"version": ..., "wall_s": ...} or {"error": ...}
or  request: {"model": path, "tensors": [{"type": GGML type, "offset": bytes, "nbytes": n, "count": values}], "output": path}
    output:  empty; {"version": ..., "sha256": [of each tensor's fp32 values, as llama.cpp's own C code dequantizes the bytes]}
or  request: {"model": path, "texts": [text], "conversations": [messages], "context": n, "threads": n, "exact": bool, "output": path}
    output:  empty; {"version": ..., "ids": [[token id] of each text], "rendered": [the chat template's text of each conversation]}
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import json
import mmap
import sys
import time
import urllib.request
from pathlib import Path
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


def scored(request: dict[str, Any]) -> dict[str, Any]:
    """Write the log-probabilities of the token after each prompt."""
    started = time.monotonic()
    running = server(request)
    with open(request["output"], "wb") as out:
        for prompt in request["prompts"]:
            next_token(running, prompt, request["vocab_size"]).tofile(out)
    return {"wall_s": round(time.monotonic() - started, 3)}


def dequantized(request: dict[str, Any]) -> dict[str, Any]:
    """Hashes of what `dequantize_row_*` makes of tensors; the wheel's module exports these functions."""
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    found = []
    with open(request["model"], "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in request["tensors"]:
            kind = tensor["type"].split("_")  # Q4_0 is q4_0 there, Q4_K is q4_K
            function = library["_".join(["dequantize_row", kind[0].lower(), *kind[1:]])]
            function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64], None
            values = (ctypes.c_float * tensor["count"])()
            function(data[tensor["offset"] : tensor["offset"] + tensor["nbytes"]], values, tensor["count"])
            found.append(hashlib.sha256(values).hexdigest())
    return {"sha256": found}


def tokenized(request: dict[str, Any]) -> dict[str, Any]:
    """Ids of texts, special tokens read as such and added as the model wants them, and rendered conversations; the server answers both at its local address only."""
    running = server(request)

    def post(path: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(running.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
            return json.loads(answer.read())

    ids = [post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"] for text in request["texts"]]
    return {"ids": ids, "rendered": [post("/apply-template", {"messages": messages})["prompt"] for messages in request["conversations"]]}


def main() -> None:
    """Answer one request."""
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    open(request["output"], "wb").close()
    try:
        import xllamacpp

        do = dequantized if "tensors" in request else tokenized if "texts" in request else scored
        answer = {"version": f"xllamacpp {xllamacpp.__version__}", **do(request)}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
