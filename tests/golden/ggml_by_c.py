"""ggml's own dequantization, from xllamacpp's library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
import xllamacpp


def dequantized_by_c(kind: str, data: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    function = library["dequantize_row_" + kind.replace("Q", "q", 1)]
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    source, out = np.ascontiguousarray(data), np.full(shape, np.nan, dtype=np.float32)
    function(source.ctypes.data, out.ctypes.data, out.size)
    return torch.from_numpy(out)
