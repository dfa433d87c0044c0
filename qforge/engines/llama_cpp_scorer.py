"""Runs whole windows through llama.cpp's C API (exported by the xllamacpp wheel) in a process of its own: logits of every position, as raw fp32 on stdout. Standard library only.

usage: python llama_cpp_scorer.py REQUEST.json
    request: {"model": path, "windows": [[token id]], "chunk": positions, "threads": n}
    stdout:  a line of JSON, {"version": ..., "vocab_size": V}, {"error": ...} or {"missing": ...}, then float32 [c, V] for each chunk of each window, positions 0 .. len - 2
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

# Parameters are structures that grow with every release; what is behind the fields used here is passed on as it came. These places (in 32-bit words) are those of llama.cpp
# of autumn 2026, and are believed only while the defaults found there are the known ones.
_CONTEXT, _BATCH, _STEP, _SEQUENCES, _THREADS, _BATCH_THREADS, _FLASH, _KEYS, _VALUES = 0, 1, 2, 3, 7, 8, 13, 26, 27
_DEFAULTS = {_CONTEXT: 512, _BATCH: 2048, _STEP: 512, _SEQUENCES: 1, _THREADS: 4, _BATCH_THREADS: 4, _FLASH: 0xFFFFFFFF, _KEYS: 1, _VALUES: 1}
_OFF, _F32 = 0, 0


class UnknownLayoutError(Exception):
    """This version of llama.cpp cannot be driven."""


class Parameters(ctypes.Structure):
    """Room for any version's parameters."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class Engine:
    """A model in memory with one sequence's cache, in fp32 and without flash attention (which computes in fp16)."""

    def __init__(self, request: dict[str, Any]) -> None:
        import xllamacpp

        self.version = f"xllamacpp {xllamacpp.__version__}"
        self._api = _library(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
        self._api.llama_backend_init()
        model = self._api.llama_model_load_from_file(request["model"].encode(), self._api.llama_model_default_params())
        if not model:
            raise RuntimeError("llama.cpp refuses the file")
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(model)))
        longest = max(map(len, request["windows"]))
        self._context = self._api.llama_init_from_model(model, _parameters(self._api, longest, request["chunk"], request["threads"]))
        if not self._context:
            raise RuntimeError(f"llama.cpp gives no context of {longest} tokens")
        self._batch = self._api.llama_batch_init(request["chunk"], 0, 1)

    def window(self, tokens: list[int], chunk: int, out: BinaryIO) -> None:
        """Write the logits of every position but the last."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for start in range(0, len(tokens) - 1, chunk):
            piece = tokens[start : min(start + chunk, len(tokens) - 1)]
            self._batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                self._batch.token[i], self._batch.pos[i], self._batch.n_seq_id[i], self._batch.logits[i] = token, start + i, 1, 1
                self._batch.seq_id[i][0] = 0
            if self._api.llama_decode(self._context, self._batch) != 0:
                raise RuntimeError("llama_decode failed")
            for i in range(len(piece)):
                out.write(ctypes.string_at(self._api.llama_get_logits_ith(self._context, i), 4 * self.vocab_size))


def _library(path: str) -> Any:
    api = ctypes.CDLL(path)
    pointer = ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_model_default_params": (Parameters, []),
        "llama_context_default_params": (Parameters, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Parameters]),
        "llama_init_from_model": (pointer, [pointer, Parameters]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (ctypes.c_int32, [pointer]),
        "llama_batch_init": (Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_decode": (ctypes.c_int32, [pointer, Batch]),
        "llama_get_logits_ith": (pointer, [pointer, ctypes.c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(api, name)
        function.restype, function.argtypes = result, arguments
    return api


def _parameters(api: Any, context: int, chunk: int, threads: int) -> Parameters:
    found: Parameters = api.llama_context_default_params()
    unknown = [place for place, value in _DEFAULTS.items() if found.words[place] != value]
    if unknown:
        raise UnknownLayoutError(f"this llama.cpp keeps its context's parameters elsewhere (words {unknown} are not the defaults that were expected)")
    wanted = {_CONTEXT: context, _BATCH: chunk, _STEP: chunk, _THREADS: threads, _BATCH_THREADS: threads, _FLASH: _OFF, _KEYS: _F32, _VALUES: _F32}
    for place, value in wanted.items():
        found.words[place] = value
    return found


def main() -> None:
    """Answer one request."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    try:
        engine = Engine(request)
    except Exception as e:
        answer = {"missing": str(e)} if isinstance(e, UnknownLayoutError) else {"error": f"{type(e).__name__}: {e}"}
        out.write(json.dumps(answer).encode() + b"\n")
        out.close()
        return
    out.write(json.dumps({"version": engine.version, "vocab_size": engine.vocab_size}).encode() + b"\n")
    for window in request["windows"]:
        engine.window(window, request["chunk"], out)
    out.close()


if __name__ == "__main__":
    main()
