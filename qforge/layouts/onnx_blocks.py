"""ONNX's two forms of a quantized weight: the operands of ONNX Runtime's MatMulNBits, and those of the standard DequantizeLinear.

    MatMulNBits         com.microsoft: B [O, B, bytes] unsigned codes along the inputs, low bits first; scales [O, B]; zero_points [O, bytes] packed like B,
                        absent where they are 2**(bits - 1). 2, 4 or 8 bits; one scale for 16, 32, 64, 128 or 256 inputs.
    DequantizeLinear    opset 21: weight [I, O] (transposed, as MatMul wants it) and scale [], [O] or [C, O], zero_point likewise, absent where it is 0.

Sources: onnxruntime docs/ContribOperators.md; onnx docs/Operators.md, DequantizeLinear-21. A larger group or a whole row repeats its scale, a code of fewer bits lies in the next
wider container: integers, zero points and (fp32) scales stay what they are.

Letters: O output features, I input features, B blocks in a row, R x C shape of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qforge.errors import ModelError
from qforge.layouts.base import blocks_problem, expect_contiguous, expect_finite, expect_shape, signed, take, unsigned
from qforge.layouts.bits import pack_words, unpack_words
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Number, Per, Scheme, Symmetry

_BLOCKS = (256, 128, 64, 32, 16)
_FLOATS = (Number.FP8_E4M3, Number.FP8_E5M2)


@dataclass(frozen=True, slots=True)
class MatMulNBits:
    """The layout of the contributed operator (see `qforge.layouts.base.Layout`): tensors `B`, `scales`, `zero_points`."""

    name: str = "ONNX MatMulNBits"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the operator holds the scheme losslessly, or the reason why not."""
        reason = _integer_problem(self.name, scheme) if scheme.number.is_int else f"{self.name} holds integers, not {scheme.number}"
        if reason is not None:
            return reason
        if scheme.activations is not None:
            return f"{self.name} does not round activations as {scheme} says (type qdq does)"
        span = scheme.granularity.columns
        if span and span % _BLOCKS[-1]:
            return f"{self.name} has blocks of 16, 32, 64, 128 or 256 inputs, and {span} is no multiple of 16 (type qdq takes it)"
        return None

    def problem_with(self, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape has no whole blocks; None if it has."""
        return blocks_problem(in_features, _BLOCKS[-1], self.name)

    @staticmethod
    def bits(scheme: Scheme) -> int:
        """The container of a code: 2, 4 or 8 bits."""
        return next(b for b in (2, 4, 8) if scheme.bits <= b)

    @staticmethod
    def block(scheme: Scheme, in_features: int) -> int:
        """Inputs of a block: the most that lie within one scale."""
        return next(b for b in _BLOCKS if scheme.granularity.group_size(in_features) % b == 0 and in_features % b == 0)

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        bits, block = self.bits(scheme), self.block(scheme, in_features)
        blocks = in_features // block
        shapes = {"B": ((out_features, blocks, block * bits // 8), torch.uint8), "scales": ((out_features, blocks), torch.float32)}
        return shapes if scheme.symmetric else shapes | {"zero_points": ((out_features, -(-blocks * bits // 8)), torch.uint8)}

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The operator's tensors.

        Raises:
            UnsupportedError: groups in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        bits, block = self.bits(q.scheme), self.block(q.scheme, q.in_features)
        codes, _ = unsigned(q, bits)
        packed = {"B": _pack(codes, bits).view(q.out_features, -1, block * bits // 8), "scales": _by_block(q.scales, q, block)}
        return packed if q.zeros is None else packed | {"zero_points": _pack(_by_block(q.zeros, q, block), bits)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: the tensors do not hold such a scheme.
        """
        bits, data = self.bits(scheme), take(tensors, "B", self.name)
        if data.dim() != 3:
            raise ModelError(f"{self.name} tensor 'B' has {data.dim()} dimensions where 3 are needed")
        out_features, blocks, size = data.shape
        block = size * 8 // bits
        codes = _unpack(data.flatten(1), bits, blocks * block)
        codes = signed(codes, bits) if scheme.symmetric else codes
        scales = expect_finite(expect_shape(take(tensors, "scales", self.name), (out_features, blocks), "scales", self.name), "scales", self.name)
        zeros = None
        if not scheme.symmetric:
            shape = (out_features, -(-blocks * bits // 8))
            zeros = _unpack(expect_shape(take(tensors, "zero_points", self.name), shape, "zero_points", self.name), bits, blocks)
            zeros = _by_scale(zeros, scheme, blocks * block, block, self.name)
        return QuantizedLinear(scheme, _in_range(codes, scheme, self.name), _by_scale(scales, scheme, blocks * block, block, self.name), zeros)


@dataclass(frozen=True, slots=True)
class OnnxDequantize:
    """The layout of the standard operator: tensors `weight` (one code an element, before 4-bit types are packed), `scale`, `zero_point`, `input_scale`."""

    name: str = "ONNX DequantizeLinear"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the operator holds the scheme losslessly, or the reason why not."""
        if scheme.number in _FLOATS:
            return None if scheme.scale.super_granularity is None else f"{self.name} has one level of scales, not {scheme.scale}"
        return _integer_problem(self.name, scheme) if scheme.number.is_int else f"{self.name} holds integers and 8-bit floats, not {scheme.number}"

    @staticmethod
    def bits(scheme: Scheme) -> int:
        """The container of a code: 4 or 8 bits."""
        return 4 if scheme.bits <= 4 else 8

    @staticmethod
    def scale_shape(scheme: Scheme, out_features: int, in_features: int) -> tuple[int, ...]:
        """Shape of `scale`: `[]`, `[O]` or `[C, O]`."""
        per = scheme.granularity.per
        return () if per is Per.TENSOR else (out_features,) if per is Per.CHANNEL else (scheme.scale_shape(out_features, in_features)[1], out_features)

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        scale = self.scale_shape(scheme, out_features, in_features)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": ((in_features, out_features), code_dtype(scheme)), "scale": (scale, torch.float32)}
        shapes |= {} if scheme.symmetric else {"zero_point": (scale, torch.uint8)}
        static = scheme.activations is not None and scheme.activations.static
        return shapes | ({"input_scale": ((), torch.float32)} if static else {})

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The operator's tensors.

        Raises:
            UnsupportedError: groups in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        shape = self.scale_shape(q.scheme, q.out_features, q.in_features)
        packed = {"weight": q.codes.T.contiguous(), "scale": _rows(q.scales, q.scheme, q.out_features).T.reshape(shape).contiguous()}
        if q.zeros is not None:
            packed["zero_point"] = _rows(q.zeros, q.scheme, q.out_features).T.reshape(shape).contiguous()
        return packed if q.input_scale is None else packed | {"input_scale": q.input_scale.reshape(())}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: the tensors do not hold such a scheme.
        """
        weight = take(tensors, "weight", self.name)
        if weight.dim() != 2 or weight.dtype != code_dtype(scheme):
            raise ModelError(f"{self.name} tensor 'weight' is {weight.dtype} {list(weight.shape)}, but {scheme} needs a {code_dtype(scheme)} matrix")
        in_features, out_features = weight.shape
        shape = self.scale_shape(scheme, out_features, in_features)

        def per_group(name: str) -> torch.Tensor:
            found = expect_shape(take(tensors, name, self.name), shape, name, self.name)
            return _first_rows((found.T if found.dim() == 2 else found).reshape(-1, scheme.scale_shape(out_features, in_features)[1]), scheme, self.name)

        zeros = None if scheme.symmetric else per_group("zero_point")
        codes = weight.T.contiguous() if scheme.number in _FLOATS else _in_range(weight.T.contiguous(), scheme, self.name)
        static = scheme.activations is not None and scheme.activations.static
        return QuantizedLinear(scheme, codes, expect_finite(per_group("scale"), "scale", self.name), zeros, input_scale=take(tensors, "input_scale", self.name) if static else None)


def _integer_problem(name: str, scheme: Scheme) -> str | None:
    if scheme.symmetry is Symmetry.OFFSET:
        return f"{name} has no offsets"
    return None if scheme.scale.super_granularity is None else f"{name} has one level of scales, not {scheme.scale}"


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values `[rows, n]` as whole bytes `[rows, ceil(n * bits / 8)]`."""
    size = -(-values.shape[1] * bits // 8)
    return pack_words(values, bits).view(torch.uint8)[:, :size].contiguous()


def _unpack(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(data, (0, -data.shape[1] % 4)).contiguous()
    return unpack_words(padded.view(torch.int32), bits, count)


def _rows(values: torch.Tensor, scheme: Scheme, out_features: int) -> torch.Tensor:
    """`[R, C]` for every row, `[O, C]`; a single value per tensor stays one."""
    return values.repeat_interleave(scheme.granularity.rows, 0)[:out_features] if scheme.granularity.per is Per.BLOCK else values


def _first_rows(values: torch.Tensor, scheme: Scheme, name: str) -> torch.Tensor:
    """The inverse of `_rows`."""
    tile = scheme.granularity.rows if scheme.granularity.per is Per.BLOCK else 1
    first = values[::tile].contiguous()
    if not torch.equal(_rows(first, scheme, len(values)), values):
        raise ModelError(f"rows of this {name} do not share scales as {scheme} says")
    return first


def _by_block(values: torch.Tensor, q: QuantizedLinear, block: int) -> torch.Tensor:
    """`[R, C]` -> `[O, B]`."""
    repeats = q.scheme.granularity.group_size(q.in_features) // block
    return _rows(values, q.scheme, q.out_features).repeat_interleave(repeats, 1)[:, : q.in_features // block].expand(q.out_features, -1).contiguous()


def _by_scale(values: torch.Tensor, scheme: Scheme, in_features: int, block: int, name: str) -> torch.Tensor:
    """The inverse of `_by_block`."""
    repeats = scheme.granularity.group_size(in_features) // block
    found = values[:, ::repeats].contiguous()
    if not torch.equal(found.repeat_interleave(repeats, 1)[:, : values.shape[1]], values):
        raise ModelError(f"blocks of this {name} do not share scales as {scheme} says")
    if scheme.granularity.per is not Per.TENSOR:
        return _first_rows(found, scheme, name)
    if not (found == found[0, 0]).all():
        raise ModelError(f"rows of this {name} do not share scales as {scheme} says")
    return found[:1].contiguous()


def _in_range(codes: torch.Tensor, scheme: Scheme, name: str) -> torch.Tensor:
    low, high = scheme.code_range
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise ModelError(f"this {name} holds codes that {scheme} cannot")
    return codes
