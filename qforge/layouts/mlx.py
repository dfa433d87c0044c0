"""MLX's layout of a quantized linear: what `mx.quantize` returns and `mx.dequantize` takes.

    weight   uint32 [O, I * bits / 32]     codes, unsigned, along the inputs, low bits first and without gaps
    scales   fp32   [O, B]                 value = scale * code + bias
    biases   fp32   [O, B]                 minus the zero point times the scale

Source: mlx's `mlx.core.quantize`, mode `affine`. A block has 32, 64 or 128 inputs; a larger group or a whole row repeats its scale. Scales and biases are fp32 because MLX
dequantizes in their type: products of fp16 scales with codes and zero points are exact in fp32 and not in fp16.

Letters: O output features, I input features, B blocks in a row, R x C shape of the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.layouts.base import blocks_problem, expect_contiguous, expect_finite, expect_shape, narrowest, signed, take, unsigned
from qforge.layouts.bits import pack_words, unpack_words, words_for
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

BITS = (2, 3, 4, 5, 6, 8)
_BLOCKS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Mlx:
    """The layout (see `qforge.layouts.base.Layout`)."""

    name: str = "MLX"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if not scheme.number.is_int or scheme.bits not in BITS:
            return f"{self.name} holds integers of {', '.join(map(str, BITS))} bits here, not {scheme.number}"
        if scheme.symmetry is Symmetry.OFFSET:
            return f"{self.name} is written from integer zero points, not from offsets"
        if scheme.granularity.per is Per.BLOCK or (scheme.granularity.columns and scheme.granularity.columns % _BLOCKS[-1]):
            return f"{self.name} has one scale for 32, 64 or 128 inputs of a row, which {scheme.granularity} is not made of"
        if scheme.scale.super_granularity is not None or scheme.scale.type not in (ScaleType.F16BF16, ScaleType.F16, ScaleType.BF16):
            return f"{self.name} multiplies scales and zero points in fp32, where only scales of 16 bits stay exact, not {scheme.scale}"
        if scheme.activations is not None:
            return f"{self.name} cannot say that activations are rounded"
        return None

    def problem_with(self, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape has no whole blocks; None if it has."""
        return blocks_problem(in_features, _BLOCKS[-1], self.name)

    @staticmethod
    def block(scheme: Scheme, in_features: int) -> int:
        """Inputs of a block: the most that lie within one scale."""
        return next(b for b in _BLOCKS if scheme.granularity.group_size(in_features) % b == 0)

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        scales = (out_features, in_features // self.block(scheme, in_features))
        return {"weight": ((out_features, words_for(in_features, scheme.bits)), torch.uint32), "scales": (scales, torch.float32), "biases": (scales, torch.float32)}

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The three tensors.

        Raises:
            UnsupportedError: groups in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        codes, zeros = unsigned(q, q.scheme.bits)
        scales, biases = (_by_block(v, q, self.block(q.scheme, q.in_features)) for v in (q.scales, -q.scales * zeros.float()))
        return {"weight": pack_words(codes, q.scheme.bits).view(torch.uint32), "scales": scales, "biases": biases}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: the tensors do not hold such a scheme.
        """
        words = take(tensors, "weight", self.name)
        if words.dim() != 2 or words.dtype != torch.uint32:
            raise ModelError(f"{self.name} weight is {words.dtype} {list(words.shape)}; a matrix of torch.uint32 is readable")
        in_features = words.shape[1] * 32 // scheme.bits
        codes = unpack_words(words.view(torch.int32), scheme.bits, in_features)
        blocks = in_features // self.block(scheme, in_features)
        scales, biases = (expect_finite(expect_shape(take(tensors, n, self.name), (len(words), blocks), n, self.name), n, self.name) for n in ("scales", "biases"))
        if scheme.symmetry is Symmetry.OFFSET:
            return QuantizedLinear(scheme, codes, scales.contiguous(), biases.contiguous(), bias=tensors.get("bias"))
        rows, columns = scheme.scale_shape(len(words), in_features)
        per_scale = scales.reshape(rows, columns, -1)
        zeros = torch.where(scales == 0, 0, -biases / scales).reshape(rows, columns, -1)
        if not (per_scale == per_scale[..., :1]).all() or not (zeros == zeros[..., :1]).all():
            raise ModelError(f"blocks of this {self.name} weight do not share scales as {scheme} says")
        middle, found = 1 << (scheme.bits - 1), zeros[..., 0]
        if (found != found.round()).any() or found.min() < 0 or found.max() > scheme.code_range[1] + (middle if scheme.symmetric else 0):
            raise ModelError(f"this {self.name} weight has biases that are no multiples of its scales, or beyond its codes")
        if not scheme.symmetric:
            return QuantizedLinear(scheme, codes, per_scale[..., 0].contiguous(), found.to(torch.uint8), bias=tensors.get("bias"))
        if not (found[per_scale[..., 0] != 0] == middle).all():
            raise ModelError(f"this {self.name} weight is not symmetric: its zero points are not {middle} everywhere")
        return QuantizedLinear(scheme, signed(codes, scheme.bits), per_scale[..., 0].contiguous(), bias=tensors.get("bias"))


def _by_block(values: torch.Tensor, q: QuantizedLinear, block: int) -> torch.Tensor:
    """`[R, C]` -> `[O, B]`."""
    return values.repeat_interleave(q.scheme.granularity.group_size(q.in_features) // block, 1).expand(q.out_features, -1).contiguous()


def read_config(config: Mapping[str, Any], quantized: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from `quantization` of an MLX model's config.json; whether biases are zero points (and all the middle one) is seen in them.

    Args:
        config: `quantization`: bits and group size, and by name where a linear has others.
        quantized: module names of the linears that have `scales`.
        read: gives a stored tensor by name.

    Raises:
        ModelError: the config is malformed, or describes codes that are no integers.
    """
    schemes = {}
    for name in quantized:
        own = config.get(name, config)
        settings = [own.get("bits"), own.get("group_size"), own.get("mode", "affine")] if isinstance(own, Mapping) else [None] * 3
        bits, group, mode = settings
        if type(bits) is not int or bits not in BITS or type(group) is not int or group not in _BLOCKS or mode != "affine":
            raise ModelError(
                f"an MLX linear of {bits!r} bits in groups of {group!r}, mode {mode!r}, is not readable ('{name}'); {', '.join(map(str, BITS))} bits in groups of 32, 64 or 128 are"
            )
        scales, biases = (read(f"{name}.{part}").float() for part in ("scales", "biases"))
        schemes[name] = Scheme(Number(f"int{bits}"), Granularity(Per.GROUP, group, 1), _symmetry(bits, scales, biases), ScaleFormat(narrowest(scales)))
    return schemes


def _symmetry(bits: int, scales: torch.Tensor, biases: torch.Tensor) -> Symmetry:
    if scales.shape != biases.shape or (biases == -scales * (1 << (bits - 1))).all():
        return Symmetry.SYM
    zeros = torch.where(scales == 0, 0, -biases / scales)
    whole = (zeros == zeros.round()) & (zeros >= 0) & (zeros < 1 << bits) & (biases == -scales * zeros)
    return Symmetry.ASYM if whole.all() else Symmetry.OFFSET
