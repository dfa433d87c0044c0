"""The native CPU kernels: packed weights (integers, 8-bit floats, 4-bit code books) or dense ones times fp32 activations; packed integers times rounded activations;
both sides in bf16.

A row's result is equal bit for bit whatever other rows are in the batch, and for any number of threads (linear.h, integer.h, blockwise.h and bf16.h in kernels/include/qforge: how
sums are ordered).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge import numerics
from qforge.ops.memory import Arena
from qforge.ops.native_module import code_for, context, instruction_sets, missing
from qforge.ops.native_weight import Buffer, NativeWeight
from qforge.ops.packing import Tiles, for_rounded, pack_dense, pack_quantized
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Number, Per, Scheme, Symmetry, parse

LONGEST_RUN = 65536  # inputs, kLongestRun of integer.h


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight in tiles, and the native view of it (which points into the tensors held here).

    Attributes:
        scheme_text: the scheme in text form, as an operation of torch takes it.
        arithmetic: how the native step multiplies with it: `FP32`, `INT8` (activations rounded by row), or None where its activations are rounded elsewhere first.
    """

    tiles: Tiles
    weight: NativeWeight
    view: Any
    arithmetic: str | None = "FP32"
    scheme: Scheme | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scheme_text: str = ""


@functools.cache
def _arena() -> Arena:
    return Arena()


def _placed(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else _arena().place(t)


def _packed(
    tiles: Tiles, bias: torch.Tensor | None, scheme: Scheme | None = None, input_scale: torch.Tensor | None = None, *, activations: str = "F32", arithmetic: str | None = "FP32"
) -> Packed:
    tiles = replace(
        tiles, codes=_arena().place(tiles.codes), scales=_placed(tiles.scales), zeros=_placed(tiles.zeros), code_sums=_placed(tiles.code_sums), pair_sums=_placed(tiles.pair_sums)
    )
    bias = None if bias is None else bias.float().contiguous()
    weight = _weight(tiles, bias, activations)
    return Packed(tiles, weight, weight.view(), arithmetic, scheme, input_scale, bias, "" if scheme is None else str(scheme))


def _weight(tiles: Tiles, bias: torch.Tensor | None, activations: str) -> NativeWeight:
    scales = "half_scales" if tiles.scales is not None and tiles.scales.dtype == torch.float16 else "scales"
    tensors = {scales: tiles.scales, "zeros": tiles.zeros, "code_sums": tiles.code_sums, "pair_sums": tiles.pair_sums, "book": tiles.book, "bias": bias, "gather": tiles.gather}
    buffers = {name: bytes_of(t) for name, t in tensors.items()}
    codes = bytes_of(tiles.codes)
    assert codes is not None
    return NativeWeight(tiles.format, tiles.out_features, tiles.in_features, tiles.blocks, tiles.block_k, tiles.run, activations, codes, **buffers)


def bytes_of(t: torch.Tensor | None) -> Buffer | None:
    """A contiguous tensor's memory, which the result holds."""
    if t is None:
        return None
    assert t.is_contiguous(), t.shape
    return t.view(-1).view(torch.uint8).numpy()


def _inputs(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`x [T, I]` fp32 as a kernel reads it: inputs in packed order, each row contiguous."""
    assert x.dtype == torch.float32, x.dtype
    assert x.shape[1:] == (packed.tiles.in_features,), (x.shape, packed.tiles.in_features)
    if packed.tiles.gather is not None:
        return torch.nn.functional.pad(x, (0, 1)).index_select(1, packed.tiles.gather)
    return x.contiguous() if x.stride(1) != 1 or (x.shape[0] > 1 and x.stride(0) < x.shape[1]) else x


def _product(x: torch.Tensor, packed: Packed, threads: int | None, isa: str | None, static_scale: float | None = None) -> torch.Tensor:
    """`x [T, I]` fp32 -> `[T, O]` fp32. A static scale (0: none, one for each row) asks for the product of integers."""
    x = _inputs(x, packed)
    if torch.compiler.is_compiling():
        t, w = packed.tiles, packed.weight
        tensors, sizes = (t.codes, t.scales, t.zeros, t.book, t.code_sums, t.pair_sums, packed.bias), (t.format, t.out_features, t.in_features, t.blocks, t.block_k, t.run)
        y: torch.Tensor = _product_operation(x, *tensors, *sizes, w.activations, static_scale, threads, isa)
        return y
    return _run(packed.view, x, packed.tiles.out_features, threads, isa, static_scale)


def _run(view: Any, x: torch.Tensor, out_features: int, threads: int | None, isa: str | None, static_scale: float | None) -> torch.Tensor:
    y, runner = x.new_empty(x.shape[0], out_features), context(threads, isa)
    if static_scale is None:
        runner.linear(view, x.data_ptr(), x.shape[0], x.stride(0), y.data_ptr(), out_features)
    else:
        runner.linear_int8(view, x.data_ptr(), x.shape[0], x.stride(0), static_scale, y.data_ptr(), out_features)
    return y


# Operations of torch, for torch.compile: it traces neither addresses nor schemes. Run eagerly, functions are called: the dispatch of an operation costs 40 us.
@torch.library.custom_op("qforge::native_linear", mutates_args=(), device_types="cpu")
def _product_operation(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None, book: torch.Tensor | None, code_sums: torch.Tensor | None,
    pair_sums: torch.Tensor | None, bias: torch.Tensor | None, form: str, out_features: int, in_features: int, blocks: int, block_k: int, run: int, activations: str,
    static_scale: float | None, threads: int | None, isa: str | None,
) -> torch.Tensor:  # fmt: skip
    weight = _weight(Tiles(form, out_features, in_features, blocks, block_k, codes, scales, zeros, None, run, book, code_sums, pair_sums), bias, activations)
    return _run(weight.view(), x, out_features, threads, isa, static_scale)


@_product_operation.register_fake
def _(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None, book: torch.Tensor | None, code_sums: torch.Tensor | None,
    pair_sums: torch.Tensor | None, bias: torch.Tensor | None, form: str, out_features: int, in_features: int, blocks: int, block_k: int, run: int, activations: str,
    static_scale: float | None, threads: int | None, isa: str | None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], out_features)


@torch.library.custom_op("qforge::round_activations", mutates_args=())
def _rounding_operation(x: torch.Tensor, scheme: str, static_scale: torch.Tensor | None) -> torch.Tensor:
    return numerics.quantize_activations(x, parse(scheme), static_scale)


@_rounding_operation.register_fake
def _(x: torch.Tensor, scheme: str, static_scale: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


class NativeKernel:
    """Codes stay packed; they are unpacked in registers (few rows) or once into a panel in cache (many rows). Activations are fp32, rounded before where the scheme says so."""

    name = "native"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    @property
    def code(self) -> str | None:
        """See `Kernel`."""
        return self._isa or code_for("floats")

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Integers of up to 8 bits with or without zero points, e4m3 floats, 4-bit code books; every shape (see `Kernel.supports`)."""
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if scheme.number is Number.FP8_E5M2:
            return f"it unpacks integers, fp8-e4m3 and 4-bit code books, not {scheme.number}"
        if scheme.symmetry is Symmetry.OFFSET:
            return "it has integer zero points, not real offsets"
        if scheme.activations is not None and scheme.activations.granularity.per is Per.TENSOR and not scheme.activations.static:
            return "a dynamic activation scale per tensor depends on the whole batch"
        return missing()

    def prepack(self, q: QuantizedLinear) -> Packed:
        """Codes in tiles of 16 outputs, W4N16 or its 8-bit counterpart (see `packing`)."""
        return _packed(pack_quantized(q), q.bias, q.scheme, q.input_scale, arithmetic="FP32" if q.scheme.activations is None else None)

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32; activations are rounded first where the scheme says so."""
        if packed.scheme is not None and packed.scheme.activations is not None:
            if torch.compiler.is_compiling():
                x = _rounding_operation(x, packed.scheme_text, packed.input_scale)
            else:
                x = numerics.quantize_activations(x, packed.scheme, packed.input_scale)
        return _product(x, packed, self._threads, self._isa)


class NativeInt8:
    """Both sides integers: activations rounded to int8 by row, packed integer weights, products summed exactly in int32 (kernels/include/qforge/integer.h)."""

    name = "native-int8"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    @property
    def code(self) -> str | None:
        """See `Kernel`."""
        return self._isa or code_for("bytes")

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Integer weights with or without zero points, int8 activations with a scale by token or a static one; every shape up to 65,536 inputs (see `Kernel.supports`)."""
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        a = scheme.activations
        if not scheme.number.is_int or scheme.symmetry is Symmetry.OFFSET:
            return f"it multiplies integers, not {scheme.number}-{scheme.symmetry}"
        if a is None or a.number is not Number.INT8 or not (a.granularity.per is Per.TOKEN or a.static):
            return "it takes activations as int8 with a scale by token or a static one"
        if shape[1] > LONGEST_RUN:
            return f"more than {LONGEST_RUN} products might overflow a sum in int32"
        return missing()

    def prepack(self, q: QuantizedLinear) -> Packed:
        """As `NativeKernel` has it."""
        return _packed(pack_quantized(q), q.bias, q.scheme, q.input_scale, arithmetic="INT8")

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32."""
        return _product(x, packed, self._threads, self._isa, 0.0 if packed.input_scale is None else float(packed.input_scale))


class NativeRounded:
    """Packed integer weights times activations that are rounded on the fly, in segments of 32 or 64 inputs, to integers of 8 or 16 bits (kernels/include/qforge/blockwise.h).

    Args:
        bits: 8 is fastest, 5e-3 to 1e-2 off the product with unrounded activations (relative); 16 takes twice the work of 8 and is 2e-5 to 5e-5 off.
    """

    def __init__(self, bits: int, threads: int | None = None, isa: str | None = None) -> None:
        self.name = f"native-a{bits}"
        self.bits = bits
        self._threads, self._isa = threads, isa

    @property
    def code(self) -> str | None:
        """See `Kernel`."""
        return self._isa or code_for("blocks")

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Integer weights with or without zero points whose scheme leaves activations alone; every shape (see `Kernel.supports`)."""
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if not scheme.number.is_int or scheme.symmetry is Symmetry.OFFSET:
            return f"it multiplies integers, not {scheme.number}-{scheme.symmetry}"
        if scheme.activations is not None:
            return f"the scheme rounds activations its own way ({scheme.activations})"
        return missing()

    def prepack(self, q: QuantizedLinear) -> Packed:
        """As `NativeKernel` has it."""
        return _packed(for_rounded(pack_quantized(q), self.bits, by_pairs=self.code == "avx512-vnni-pairs"), q.bias, activations=f"INT{self.bits}")

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32."""
        return _product(x, packed, self._threads, self._isa)


class NativeBf16:
    """Weights and activations in bf16, sums in fp32, as other engines compute (kernels/include/qforge/bf16.h): for the tiles of AMX, there the fastest product of many rows.

    Weights stay packed and become bf16 as they are multiplied. Both sides round to 8 bits of mantissa: 2e-3 to 3e-3 off (relative).
    """

    name = "native-bf16"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    @property
    def code(self) -> str | None:
        """See `Kernel`."""
        return self._isa or code_for("bf16")

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Integer weights with or without zero points and 4-bit code books whose scheme leaves activations alone; with AMX, or where one was asked for (see `Kernel.supports`)."""
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if scheme.number in (Number.FP8_E4M3, Number.FP8_E5M2) or scheme.symmetry is Symmetry.OFFSET:
            return f"it multiplies integers and 4-bit code books, not {scheme.number}-{scheme.symmetry}"
        if scheme.activations is not None:
            return f"the scheme rounds activations its own way ({scheme.activations})"
        if self._isa is None and missing() is None and "amx" not in instruction_sets():
            return "it gains only where the CPU has AMX"
        return missing()

    def prepack(self, q: QuantizedLinear) -> Packed:
        """As `NativeKernel` has it."""
        return _packed(pack_quantized(q), q.bias, activations="BF16")

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32."""
        return _product(x, packed, self._threads, self._isa)


class NativeDense:
    """The same product for weights that stay fp32, fp16 or bf16 (unquantized linears, output heads)."""

    name = "native-dense"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self._threads, self._isa = threads, isa

    @property
    def code(self) -> str | None:
        """See `Kernel`."""
        return self._isa or code_for("floats")

    def prepack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        """`weight [O, I]` in tiles, in its own dtype."""
        return _packed(pack_dense(weight), bias)

    def run(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`x [T, I]` fp32 -> `[T, O]` fp32."""
        return _product(x, packed, self._threads, self._isa)
