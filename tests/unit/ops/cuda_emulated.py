"""Kernels in CUDA C++ compiled for this processor (tests/native/cuda): threads take turns, and what a GPU does without waiting is done as late as it may be."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import torch

from qforge.ops.cuda import w4
from qforge.ops.cuda.source import Source
from qforge.ops.triton.w4_pack import W4

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def built(source: Source, folder: Path, files: Path = ROOT / "qforge/ops/cuda") -> ctypes.CDLL:
    """A kernel as a library; `files`: where its source is."""
    name = "-".join([source.kernel, *(f"{n}{v}" for n, v in source.constants)])
    path = folder / f"{name}.so"
    if not path.exists():
        flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-I", str(ROOT / "tests/native/cuda"), "-I", str(files), f"-D{source.kernel.upper()}", *source.options]
        subprocess.run([str(COMPILER), *flags, str(ROOT / "tests/native/cuda/products.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def few(x: torch.Tensor, w: W4, shape: w4.Few, folder: Path, grid: int, files: Path = ROOT / "qforge/ops/cuda") -> torch.Tensor:
    """What `w4_few` gives on a grid of so many blocks."""
    library = built(w4.few_source(w4.constants(x, w), shape), folder, files)
    return _run(library, x, w, w.in_features, w.steps, grid, shape.shared(len(x), w.steps))


def many(x: torch.Tensor, w: W4, plan: w4.Plan, folder: Path, files: Path = ROOT / "qforge/ops/cuda") -> torch.Tensor:
    """What `w4_many` gives."""
    library = built(w4.many_source(w4.constants(x, w), plan.tile), folder, files)
    return _run(library, x, w, w.in_features, w.steps, -(-w.steps // plan.parts), plan.tile.shared)


def _run(library: ctypes.CDLL, x: torch.Tensor, w: W4, *rest: int) -> torch.Tensor:
    y = torch.full((len(x), w.out_features), torch.nan, dtype=x.dtype)
    tensors = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (x, w.words, w.scales, w.zeros, w.bias, y)]
    library.run.restype = ctypes.c_bool
    if not library.run(*tensors, len(x), w.out_features, *rest):
        raise TimeoutError("threads wait for each other for ever")
    return y
