"""Asks llama.cpp (the xllamacpp wheel) what it reads, in an interpreter of its own: a request file in, a JSON answer out. Standard library and xllamacpp only.

usage: python llama_cpp_adapter.py REQUEST.json
    request: {"model": path, "tensors": [{"type": GGML type, "offset": bytes, "nbytes": n, "count": values}], "output": path}
    stdout:  last line, {"version": ..., "sha256": [of each tensor's fp32 values, as llama.cpp's own C code dequantizes the bytes]} or {"error": ...}; `output` stays empty
or  request: {"model": path, "texts": [text], "conversations": [messages], "context": n, "threads": n, "output": path}
    stdout:  last line, {"version": ..., "ids": [[token id] of each text], "rendered": [the chat template's text of each conversation]} or {"error": ...}
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

_KEPT: list[Any] = []  # servers: taking one down right after its start can wait forever, where the loop that would hear of it has not begun


def server(request: dict[str, Any]) -> Any:
    """llama.cpp's server inside this process, with the model loaded, up to the end of the process."""
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
    _KEPT.append(xllamacpp.Server(params))
    return _KEPT[-1]


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

        do = dequantized if "tensors" in request else tokenized
        answer = {"version": f"xllamacpp {xllamacpp.__version__}", **do(request)}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    try:
        print("\n" + json.dumps(answer), flush=True)
    finally:
        os._exit(0)  # not by way of what is kept


if __name__ == "__main__":
    main()
