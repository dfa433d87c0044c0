"""GGUF's Q4_K as a type that holds integers unchanged: one scale and one zero point for 256 inputs, at 4.5 bits a weight.

    value = d * s * code - dmin * m     with s = 1, m = the zero point and dmin = d, all eight groups of a block alike

Both products are exact in fp32 (11 bits times 4), and so is their difference. Asymmetric codes need a fifth bit in Q5_0; here their zero point has a place of its own.
A larger group or a whole row repeats its scale in each block. A file of another program has other scales in these blocks, and is no integers to us.

Letters: O output features, I input features, N blocks, R x C shape of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qforge.errors import ModelError
from qforge.layouts import gguf_superblocks
from qforge.layouts.base import expect_contiguous, expect_finite, half_problem, half_scales, take, unsigned
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry
from qforge.superblocks import TYPES, Superblocks

_TYPE, _BITS = TYPES["Q4_K"], 4


@dataclass(frozen=True, slots=True)
class GgufQ4K:
    """The layout (see `qforge.layouts.base.Layout`): `weight`, uint8 `[O, blocks * 144]`."""

    name: str = "GGUF Q4_K"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the type holds the scheme losslessly, or the reason why not."""
        if not scheme.number.is_int or scheme.bits > _BITS or scheme.symmetry is Symmetry.OFFSET:
            return f"{self.name} holds integers of up to {_BITS} bits with one scale and zero point for {_TYPE.block} inputs, not {scheme}"
        if scheme.granularity.per is Per.BLOCK or scheme.granularity.columns % _TYPE.block:
            return f"{self.name} holds one scale for {_TYPE.block} inputs of a row without rounding, and {scheme.granularity} is not made of such"
        return half_problem(scheme, self.name)

    def problem_with(self, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape has no whole blocks; None if it has."""
        return f"an input width of {in_features} is not a multiple of {_TYPE.block}, the block of {self.name}" if in_features % _TYPE.block else None

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The blocks of each row.

        Raises:
            UnsupportedError: a scale is not exact in fp16, or the groups are not contiguous (act-order).
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        scales, (codes, zeros) = half_scales(q, self.name), unsigned(q, _BITS)
        d, minima = _by_block(scales, q), _by_block(zeros.to(torch.int16), q)[:, None].expand(-1, _TYPE.groups).contiguous()
        blocks = Superblocks(_TYPE, codes.to(torch.int16).view(-1, _TYPE.groups, _TYPE.group), d, torch.ones_like(minima), d, minima)
        return {"weight": gguf_superblocks.pack(blocks).view(q.out_features, -1)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the blocks describe.

        Raises:
            ModelError: the blocks do not hold such a scheme.
        """
        data = take(tensors, "weight", self.name)
        if data.dim() != 2 or data.shape[1] % _TYPE.nbytes:
            raise ModelError(f"{self.name} data of shape {list(data.shape)} is not made of whole blocks of {_TYPE.nbytes} bytes")
        b = gguf_superblocks.unpack("Q4_K", data.reshape(-1, _TYPE.nbytes))
        assert b.scales is not None
        assert b.dmin is not None
        assert b.minima is not None
        shape = scheme.scale_shape(len(data), data.shape[1] // _TYPE.nbytes * _TYPE.block)
        scales, zeros = (v.reshape(*shape, -1) for v in (expect_finite(b.d, "d", self.name), b.minima.flatten()))
        alike = (scales == scales[..., :1]).all() and (zeros == zeros[..., :1]).all() and (b.scales == 1).all() and torch.equal(b.d, b.dmin)
        middle = 1 << (_BITS - 1) if scheme.symmetric else 0
        codes = b.codes.reshape(len(data), -1) - middle
        low, high = scheme.code_range
        zeros = zeros[..., 0]
        fits = codes.min() >= low and codes.max() <= high and ((zeros == middle).all() if scheme.symmetric else zeros.max() <= high)
        if not alike or not fits:
            raise ModelError(f"these {self.name} blocks do not hold {scheme}: their scales and minima are of another making")
        return QuantizedLinear(scheme, codes.to(torch.int8 if scheme.symmetric else torch.uint8), scales[..., 0].contiguous(), None if scheme.symmetric else zeros.to(torch.uint8))


def _by_block(values: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    """`[R, C]` for each block, `[N]`."""
    repeats = q.scheme.granularity.group_size(q.in_features) // _TYPE.block
    return values.repeat_interleave(repeats, 1).expand(q.out_features, -1).reshape(-1).contiguous()
