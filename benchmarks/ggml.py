"""llama.cpp's product with a repacked Q4_0 weight, through the C functions of a shared library that holds ggml (that of the xllamacpp wheel, or libggml of a llama-cpp-python)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

F32, Q4_0 = 0, 2
P, S, LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class _Init(ctypes.Structure):
    _fields_ = [("mem_size", S), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """ggml's CPU backend."""

    def __init__(self, library: str, threads: int) -> None:
        self._library = ctypes.CDLL(library)
        self._backend = self._call("ggml_backend_cpu_init", P)
        self._call("ggml_backend_cpu_set_n_threads", None, P(self._backend), ctypes.c_int(threads))

    def features(self) -> list[str]:
        """The instruction sets that it was compiled for."""
        return [n for n in ("avx2", "avx_vnni", "avx512", "avx512_vnni") if self._call(f"ggml_cpu_has_{n}", ctypes.c_int)]

    def products(self, weight: np.ndarray, x: np.ndarray, copies: int) -> tuple[Callable[[], None], np.ndarray]:
        """(a call that multiplies x `[T, I]` by each of `copies` weights `[O, I]` in turn, the result `[T, O]` of one product)."""
        rows, (outputs, inputs) = len(x), weight.shape
        size = outputs * inputs // 32 * 18
        codes = np.empty(size, np.uint8)
        self._call("ggml_quantize_chunk", S, ctypes.c_int(Q4_0), P(weight.ctypes.data), P(codes.ctypes.data), LONG(0), LONG(outputs), LONG(inputs), P(None))
        held = self._context()
        weights = [self._call("ggml_new_tensor_2d", P, P(held), ctypes.c_int(Q4_0), LONG(inputs), LONG(outputs)) for _ in range(copies)]
        repacked = self._call("_Z35ggml_backend_cpu_repack_buffer_typev", P)
        assert self._call("ggml_backend_alloc_ctx_tensors_from_buft", P, P(held), P(repacked))
        for w in weights:
            self._call("ggml_backend_tensor_set", None, P(w), P(codes.ctypes.data), S(0), S(size))
        moving = self._context()
        inputs_tensor = self._call("ggml_new_tensor_2d", P, P(moving), ctypes.c_int(F32), LONG(inputs), LONG(rows))
        graph = self._call("ggml_new_graph", P, P(moving))
        results = [self._call("ggml_mul_mat", P, P(moving), P(w), P(inputs_tensor)) for w in weights]
        for r in results:
            self._call("ggml_build_forward_expand", None, P(graph), P(r))
        assert self._call("ggml_backend_alloc_ctx_tensors", P, P(moving), P(self._backend))
        x = np.ascontiguousarray(x, np.float32)
        self._call("ggml_backend_tensor_set", None, P(inputs_tensor), P(x.ctypes.data), S(0), S(x.nbytes))

        def run() -> None:
            assert self._call("ggml_backend_graph_compute", ctypes.c_int, P(self._backend), P(graph)) == 0

        run()
        y = np.empty((rows, outputs), np.float32)
        self._call("ggml_backend_tensor_get", None, P(results[-1]), P(y.ctypes.data), S(0), S(y.nbytes))
        return run, y

    def _context(self) -> int:
        found: int = self._call("ggml_init", P, _Init(16 << 20, None, True))
        return found

    def _call(self, name: str, result: object, *args: object) -> int:
        function = self._library[name]
        function.restype = result
        found: int = function(*args)
        return found
