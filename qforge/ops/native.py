"""The native CPU kernels: packed integer weights, or dense ones, times fp32 activations.

A row's result is equal bit for bit whatever other rows are in the batch, and for any number of threads (kernels/include/qforge/linear.h says how sums are ordered).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from qforge import numerics
from qforge.ops.packing import Tiles, pack_dense, pack_quantized
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry

_log = logging.getLogger(__name__)


@functools.cache
def module() -> Any | None:
    """The compiled module, or None (said once in the log) where it was not built."""
    try:
        return importlib.import_module("qforge.ops._native")
    except ImportError as e:
        _log.warning("the native kernels are not available (%s): products run on the plain reference, many times slower; reinstall qforge where a C++ compiler is at hand", e)
        return None


def missing() -> str | None:
    """Why no native kernel runs here; None if they do."""
    return None if module() is not None else "the native module qforge.ops._native was not built"


def default_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this CPU runs, fastest first; empty without the native module."""
    native = module()
    return [] if native is None else list(native.instruction_sets())


@functools.lru_cache(maxsize=8)
def context(threads: int | None = None, isa: str | None = None) -> Any:
    """The thread pool and instruction set that products run with; made once for each pair. Needs the native module."""
    native = module()
    assert native is not None, missing()
    return native.Context(threads or default_threads(), isa or instruction_sets()[0])


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight in tiles, and the native view of it (which points into the tensors held here)."""

    tiles: Tiles
    bias: torch.Tensor | None
    view: Any
    scheme: Scheme | None = None
    input_scale: torch.Tensor | None = None


def _packed(tiles: Tiles, bias: torch.Tensor | None, scheme: Scheme | None = None, input_scale: torch.Tensor | None = None) -> Packed:
    native = module()
    assert native is not None, missing()
    bias = None if bias is None else bias.float().contiguous()
    addresses = [0 if t is None else t.data_ptr() for t in (tiles.codes, tiles.scales, tiles.zeros, bias)]
    view = native.Weight(getattr(native.Format, tiles.format), tiles.out_features, tiles.blocks, tiles.block_k, *addresses)
    return Packed(tiles, bias, view, scheme, input_scale)


def _product(runner: Any, x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`x [T, I]` fp32 -> `[T, O]` fp32."""
    assert x.dtype == torch.float32, x.dtype
    assert x.shape[1:] == (packed.tiles.in_features,), (x.shape, packed.tiles.in_features)
    if packed.tiles.gather is not None:
        x = torch.nn.functional.pad(x, (0, 1)).index_select(1, packed.tiles.gather)
    elif x.stride(1) != 1 or (x.shape[0] > 1 and x.stride(0) < x.shape[1]):
        x = x.contiguous()
    y = x.new_empty(x.shape[0], packed.tiles.out_features)
    runner.linear(packed.view, x.data_ptr(), x.shape[0], x.stride(0), y.data_ptr(), packed.tiles.out_features)
    return y


class NativeKernel:
    """Integer codes stay packed; they are unpacked in registers (few rows) or once into a panel in cache (many rows). Activations stay fp32."""

    name = "native"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Integers of up to 8 bits with or without zero points; every shape (see `Kernel.supports`)."""
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if not scheme.number.is_int:
            return f"it multiplies integer codes, not {scheme.number}"
        if scheme.symmetry is Symmetry.OFFSET:
            return "it has integer zero points, not real offsets"
        if scheme.activations is not None and scheme.activations.granularity.per is Per.TENSOR and not scheme.activations.static:
            return "a dynamic activation scale per tensor depends on the whole batch"
        return missing()

    def prepack(self, q: QuantizedLinear) -> Packed:
        """Codes in tiles of 16 outputs, W4N16 or its 8-bit counterpart (see `packing`)."""
        return _packed(pack_quantized(q), q.bias, q.scheme, q.input_scale)

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32; activations are rounded first where the scheme says so."""
        if packed.scheme is not None and packed.scheme.activations is not None:
            x = numerics.quantize_activations(x, packed.scheme, packed.input_scale)
        return _product(context(self._threads, self._isa), x, packed)


class NativeDense:
    """The same product for weights that stay fp32, fp16 or bf16 (unquantized linears, output heads)."""

    name = "native-dense"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    def prepack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        """`weight [O, I]` in tiles, in its own dtype."""
        return _packed(pack_dense(weight), bias)

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32."""
        return _product(context(self._threads, self._isa), x, packed)
