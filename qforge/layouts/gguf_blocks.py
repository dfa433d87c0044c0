"""GGUF's block types that hold integer codes unchanged: Q4_0, Q5_0 and Q8_0, one fp16 scale for 32 inputs.

    Q4_0   18 bytes: d, 16 bytes of nibbles (first 16 inputs low, last 16 high)             value = d * (nibble - 8)
    Q5_0   22 bytes: d, 32 high bits, 16 bytes of nibbles                                   value = d * (v - 16)
    Q8_0   34 bytes: d, 32 int8                                                             value = d * v

Source: ggml's `ggml-common.h` and `ggml-quants.c`. A larger group or a whole row repeats its scale in each block. A zero point is subtracted from
the codes, so what is stored is q - z: asymmetric 4-bit codes need 5 bits. Q4_1 and Q5_1 store a minimum in fp16, which rounds scale * zero point.
The zero point itself is no part of the type. `zeros_above` beside the weight says by how much it exceeds the smallest that fits the codes of its group
(0 for any group whose codes reach 0), so that other formats get the first codes back; llama.cpp needs none of it.

Letters: O output features, I input features, B blocks in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qforge.errors import ModelError
from qforge.layouts.base import expect_contiguous, expect_finite, expect_shape, half_problem, half_scales, take
from qforge.layouts.bits import pack_flags, pack_halves, unpack_flags, unpack_halves
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Per, Scheme, Symmetry

BLOCK = 32
BITS = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
_BYTES = {"Q4_0": 18, "Q5_0": 22, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """The layout of one block type (see `qforge.layouts.base.Layout`): `weight`, uint8 `[O, B * bytes]`, and for a scheme with zero points `zeros_above`, uint8 `[R, C]`."""

    type: str

    @property
    def name(self) -> str:
        """For messages and tables."""
        return f"GGUF {self.type}"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the type holds the scheme losslessly, or the reason why not."""
        needed = _needed_bits(scheme)
        if needed is None:
            return f"{self.name} holds integers, not {scheme.number}"
        if scheme.symmetry is Symmetry.OFFSET:
            return f"{self.name} has no offsets"
        if needed > BITS[self.type]:
            return f"{self.name} holds {BITS[self.type]} bits, but {scheme} needs {needed}" + ("" if scheme.symmetric else " (codes minus zero point)")
        if scheme.granularity.per is Per.GROUP and scheme.granularity.columns % BLOCK:
            return f"{self.name} has one scale for {BLOCK} inputs, and group size {scheme.granularity.columns} is not a multiple of {BLOCK}"
        if scheme.granularity.per is Per.BLOCK:
            return f"{self.name} has one scale for {BLOCK} inputs, not for a two-dimensional block"
        return half_problem(scheme, self.name)

    def problem_with(self, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape has no whole blocks; None if it has."""
        return f"an input width of {in_features} is not a multiple of {BLOCK}, the block of {self.name}" if in_features % BLOCK else None

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The blocks of each row, and what they do not say of zero points.

        Raises:
            UnsupportedError: a scale is not exact in fp16, or the groups are not contiguous (act-order).
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        scales = half_scales(q, self.name)
        zeros = 0 if q.zeros is None else _per_input(q.zeros, q).to(torch.int16)
        values = (q.codes.to(torch.int16) - zeros).view(q.out_features, -1, BLOCK)
        d = _per_input(scales, q)[:, ::BLOCK].clone(memory_format=torch.contiguous_format).view(torch.uint8).view(q.out_features, -1, 2)
        tensors = {"weight": torch.cat((d, encode(self.type, values)), -1).flatten(1)}
        return tensors if q.zeros is None else tensors | {"zeros_above": q.codes.reshape(*q.zeros.shape, -1).amin(-1).minimum(q.zeros)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the blocks describe; without `zeros_above` each zero point is the smallest that fits the codes of its group.

        Raises:
            ModelError: the blocks do not hold such a scheme: scales differ inside a group, or values do not fit its bits.
        """
        data = take(tensors, "weight", self.name)
        if data.dim() != 2 or data.shape[1] % _BYTES[self.type]:
            raise ModelError(f"{self.name} data of shape {list(data.shape)} is not made of whole blocks of {_BYTES[self.type]} bytes")
        blocks = data.reshape(data.shape[0], -1, _BYTES[self.type])
        values = decode(self.type, blocks[..., 2:].contiguous()).flatten(1)
        d = expect_finite(blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), "d", self.name)
        rows, columns = scheme.scale_shape(*values.shape)
        per_scale = d.reshape(rows, columns, -1) if d.numel() % (rows * columns) == 0 else expect_shape(d, (rows, columns), "d", self.name)[..., None]
        if not (per_scale == per_scale[..., :1]).all():
            raise ModelError(f"these {self.name} blocks do not share scales as {scheme} says")
        low, high = scheme.code_range
        grouped, zeros = values.reshape(rows, columns, -1), None
        if scheme.symmetry is Symmetry.ASYM:
            shift = (-grouped.amin(-1)).clamp(0, high)
            if "zeros_above" in tensors:
                shift = shift + expect_shape(tensors["zeros_above"], (rows, columns), "zeros_above", self.name).to(torch.int16)
            if shift.max() > high:
                raise ModelError(f"the zero points of these {self.name} blocks are beyond what {scheme} holds")
            grouped, zeros = grouped + shift[..., None], shift.to(torch.uint8)
        if grouped.min() < low or grouped.max() > high:
            raise ModelError(f"these {self.name} blocks hold values that {scheme} cannot")
        return QuantizedLinear(scheme, grouped.reshape(values.shape).to(code_dtype(scheme)), per_scale[..., 0].contiguous(), zeros)


def encode(kind: str, values: torch.Tensor) -> torch.Tensor:
    """The bytes of a block's 32 signed integers, int16 `[..., 32]`, without its scale."""
    if kind == "Q8_0":
        return values.to(torch.int8).view(torch.uint8)
    unsigned = (values + (1 << (BITS[kind] - 1))).to(torch.uint8)
    return pack_halves(unsigned) if kind == "Q4_0" else pack_fives(unsigned)


def decode(kind: str, data: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`."""
    if kind == "Q8_0":
        return data.view(torch.int8).to(torch.int16)
    return (unpack_halves(data).to(torch.int16) - 8) if kind == "Q4_0" else unpack_fives(data).to(torch.int16) - 16


def pack_fives(values: torch.Tensor) -> torch.Tensor:
    """32 values below 32 as Q5_0 and Q5_1 hold them: their high bits, then their nibbles."""
    return torch.cat((pack_flags(values >> 4), pack_halves(values & 0xF)), -1)


def unpack_fives(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_fives`."""
    return unpack_halves(data[..., 4:]) | (unpack_flags(data[..., :4]) << 4)


def _needed_bits(scheme: Scheme) -> int | None:
    """Bits of a signed integer that holds every code minus its zero point."""
    if not scheme.number.is_int:
        return None
    return scheme.bits + (scheme.symmetry is Symmetry.ASYM)


def _per_input(per_group: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    """`[R, C]` values for each input of each row, `[O, I]`."""
    rows, columns = per_group.shape
    return per_group.repeat_interleave(q.in_features // columns, 1).expand(q.out_features, -1) if rows == 1 else per_group.repeat_interleave(q.in_features // columns, 1)
