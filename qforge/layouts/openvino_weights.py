"""OpenVINO's form of a compressed weight: what its plugins take in where codes, zero points and scales stand before a product, and decompress inside of it.

    weight       i4 or i8 (symmetric), u4 or u8: [O, C, G], first of two nibbles low
    zero_point   u4 or u8 [O, C, 1], absent where it is 0
    scale        f32 [O, C, 1]

Source: openvino's `ConvertFullyConnectedToFullyConnectedCompressed`, and the IRs that NNCF writes. A code of fewer bits lies in the next wider container; one scale for rows or for
the whole tensor is repeated: integers, zero points and scales stay what they are.

Letters: O output features, C groups in a row, G inputs of a group, R x C shape of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qforge.errors import ModelError
from qforge.layouts.base import expect_contiguous, expect_finite, expect_shape, take
from qforge.layouts.bits import pack_nibbles, unpack_nibbles
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry


@dataclass(frozen=True, slots=True)
class OpenvinoWeights:
    """The layout (see `qforge.layouts.base.Layout`): tensors `weight` and `zero_point` as bytes (uint8, nibbles packed along the last dimension), `scale` fp32."""

    name: str = "OpenVINO IR"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the IR holds the scheme losslessly, or the reason why not."""
        if not scheme.number.is_int:
            return f"{self.name} holds integers in this form, not {scheme.number}"
        if scheme.symmetry is Symmetry.OFFSET:
            return f"{self.name} has integer zero points, no offsets"
        if scheme.scale.super_granularity is not None:
            return f"{self.name} has one level of scales, not {scheme.scale}"
        if self.bits(scheme) == 4 and scheme.granularity.columns % 2:
            return f"{self.name} packs two 4-bit codes in a byte, and groups of {scheme.granularity.columns} are odd"
        return None

    @staticmethod
    def bits(scheme: Scheme) -> int:
        """The container of a code: 4 or 8 bits."""
        return 4 if scheme.bits <= 4 else 8

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors.

        Raises:
            UnsupportedError: groups in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        groups = q.scheme.scale_shape(q.out_features, q.in_features)[1]
        packed = {"weight": self._bytes(q.codes.reshape(q.out_features, groups, -1), q.scheme), "scale": _rows(q.scales, q)[..., None].contiguous()}
        return packed if q.zeros is None else packed | {"zero_point": self._bytes(_rows(q.zeros, q).reshape(1, -1), q.scheme)}

    def _bytes(self, codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        raw = codes.contiguous().view(torch.uint8)
        return raw if self.bits(scheme) == 8 else pack_nibbles(torch.nn.functional.pad(raw & 0xF, (0, raw.shape[-1] % 2)))

    def _codes(self, raw: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """The inverse of `_bytes`, int16."""
        codes = (raw if self.bits(scheme) == 8 else unpack_nibbles(raw)).to(torch.int16)
        half = 1 << (self.bits(scheme) - 1)
        return (codes ^ half) - half if scheme.symmetric else codes

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: the tensors do not hold such a scheme.
        """
        raw = take(tensors, "weight", self.name)
        if raw.dim() != 3 or raw.dtype != torch.uint8:
            raise ModelError(f"{self.name} weight is {raw.dtype} {list(raw.shape)}; bytes [O, C, ...] are readable")
        codes = self._codes(raw, scheme)
        (rows, groups, _), codes = codes.shape, codes.flatten(1)
        scales = expect_finite(expect_shape(take(tensors, "scale", self.name), (rows, groups, 1), "scale", self.name), "scale", self.name)[..., 0]
        zeros = None
        if not scheme.symmetric:
            zeros = self._codes(take(tensors, "zero_point", self.name), scheme).flatten()[: rows * groups].to(torch.uint8)
            zeros = self._first(expect_shape(zeros, (rows * groups,), "zero_point", self.name).view(rows, groups), scheme)
        low, high = scheme.code_range
        if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
            raise ModelError(f"this {self.name} weight holds codes that {scheme} cannot")
        return QuantizedLinear(scheme, codes.to(torch.int8 if scheme.symmetric else torch.uint8), self._first(scales, scheme), zeros)

    def _first(self, values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        """Of values for every row those of the scheme's scales."""
        step = {Per.BLOCK: scheme.granularity.rows, Per.TENSOR: len(values)}.get(scheme.granularity.per, 1)
        first = values[::step].contiguous()
        if not torch.equal(first.repeat_interleave(step, 0)[: len(values)], values):
            raise ModelError(f"rows of this {self.name} weight do not share scales as {scheme} says")
        return first


def _rows(values: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    """`[R, C]` for every row, `[O, C]`."""
    step = {Per.BLOCK: q.scheme.granularity.rows, Per.TENSOR: q.out_features}.get(q.scheme.granularity.per, 1)
    return values.repeat_interleave(step, 0)[: q.out_features].contiguous()
