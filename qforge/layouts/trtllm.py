"""The layout in which TensorRT-LLM loads the linears of a Hugging Face directory (Model Optimizer writes it): integers of 4 or 8 bits, FP8.

    W4A16_AWQ                    weight uint8 [O / 2, I], two outputs in a byte, the first in the low half; weight_scale [O, C]; pre_quant_scale [I], ones
    W8A16                        weight int8 [O, I]; weight_scale [O]
    FP8                          weight e4m3 [O, I]; weight_scale [], input_scale [], fp32
    FP8_PER_CHANNEL_PER_TOKEN    weight e4m3 [O, I]; weight_scale [O], fp32
    FP8_BLOCK_SCALES             weight e4m3 [O, I]; weight_scale_inv [O / 128, I / 128], fp32

Source: tensorrt_llm/_torch/modules/linear.py; modelopt's `pack_int4_in_uint8`. Scales of integers have the model's dtype.

Letters: O output features, I input features, C groups in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge.errors import ModelError, UnsupportedError
from qforge.layouts.base import expect_contiguous, expect_finite, expect_shape, narrowest, take, take_matrix
from qforge.layouts.bits import pack_pairs_of_rows, unpack_pairs_of_rows
from qforge.qlinear import QuantizedLinear
from qforge.scheme import ScaleFormat, Scheme, parse

FILE = "hf_quant_config.json"
_WHOLE = {
    "int8-channel-sym": "W8A16",
    "fp8-e4m3-tensor+fp8-e4m3-tensor-static": "FP8",
    "fp8-e4m3-channel+fp8-e4m3-token": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-e4m3-block128+fp8-e4m3-g128": "FP8_BLOCK_SCALES",
}
_ALGORITHMS = {(s.number, s.granularity, s.symmetry, s.activations): name for text, name in _WHOLE.items() for s in (parse(text),)} | {
    (s.number, s.granularity, s.symmetry, s.activations): "W4A16_AWQ" for s in (parse("int4-g64-sym"), parse("int4-g128-sym"))
}


@dataclass(frozen=True, slots=True)
class TrtLlm:
    """The layout (see `qforge.layouts.base.Layout`) in a model of a dtype."""

    dtype: torch.dtype = torch.float16
    name: str = "TensorRT-LLM"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if self.algorithm(scheme) is None:
            return f"{self.name} has no linear for {scheme} here; it has int4-g64-sym, int4-g128-sym, {', '.join(_WHOLE)}"
        return None if scheme.scale.super_granularity is None else f"{self.name} has one level of scales here, not {scheme.scale}"

    @staticmethod
    def algorithm(scheme: Scheme) -> str | None:
        """TensorRT-LLM's name of a scheme; None where it has none."""
        return _ALGORITHMS.get((scheme.number, scheme.granularity, scheme.symmetry, scheme.activations))

    def problem_with(self, scheme: Scheme, out_features: int) -> str | None:
        """Why a weight of this shape does not fill whole bytes; None if it does."""
        return f"{out_features} outputs of 4 bits do not fill whole bytes" if scheme.bits == 4 and out_features % 2 else None

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        kind, scales = self.algorithm(scheme), scheme.scale_shape(out_features, in_features)
        if kind == "W4A16_AWQ":
            return {"weight": ((out_features // 2, in_features), torch.uint8), "weight_scale": (scales, self.dtype), "pre_quant_scale": ((in_features,), self.dtype)}
        weight = (out_features, in_features)
        if kind == "W8A16":
            return {"weight": (weight, torch.int8), "weight_scale": ((out_features,), self.dtype)}
        named = {"FP8": ("weight_scale", ()), "FP8_PER_CHANNEL_PER_TOKEN": ("weight_scale", (out_features,))}
        name, shape = named.get(str(kind), ("weight_scale_inv", scales))
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight": (weight, torch.float8_e4m3fn), name: (shape, torch.float32)}
        return shapes | ({"input_scale": ((), torch.float32)} if kind == "FP8" else {})

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors.

        Raises:
            UnsupportedError: a scale is not exact in the model's dtype, or groups are in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, self.name)
        shapes = self.shapes(q.scheme, q.out_features, q.in_features)
        name = next(n for n in shapes if n.startswith("weight_scale"))
        scales = q.scales.reshape(shapes[name][0]).to(shapes[name][1])
        if not torch.equal(scales.float().reshape(q.scales.shape), q.scales):
            raise UnsupportedError(f"a scale is not exact in {str(self.dtype).removeprefix('torch.')}, in which {self.name} takes scales of this model")
        if q.scheme.bits == 4:
            weight = pack_pairs_of_rows(q.codes.view(torch.uint8) & 0xF)
            return {"weight": weight, name: scales, "pre_quant_scale": torch.ones(q.in_features, dtype=self.dtype)}
        packed = {"weight": q.codes.view(shapes["weight"][1]), name: scales}
        return packed if q.input_scale is None else packed | {"input_scale": q.input_scale.reshape(())}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: a tensor is missing, or does not fit the scheme.
        """
        weight = take_matrix(tensors, "weight", self.name, torch.uint8, torch.int8, torch.float8_e4m3fn)
        codes = weight.view(torch.int8 if scheme.number.is_int else torch.uint8)
        if scheme.bits == 4:
            codes = ((unpack_pairs_of_rows(codes.view(torch.uint8)) ^ 8).to(torch.int16) - 8).to(torch.int8)
        shapes = self.shapes(scheme, *codes.shape)
        if "pre_quant_scale" in shapes and not (take(tensors, "pre_quant_scale", self.name) == 1).all():
            raise ModelError(f"this {self.name} linear multiplies its inputs by factors of their own (pre_quant_scale), which qforge does not read")
        name = next(n for n in shapes if n.startswith("weight_scale"))
        scales = expect_shape(take(tensors, name, self.name), shapes[name][0], name, self.name).float().reshape(scheme.scale_shape(*codes.shape))
        static = take(tensors, "input_scale", self.name) if "input_scale" in shapes else None
        return QuantizedLinear(scheme, codes.contiguous(), expect_finite(scales, name, self.name), input_scale=static, bias=tensors.get("bias"))


def read_config(config: Mapping[str, Any], quantized: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from what `hf_quant_config.json` says of the whole model.

    Args:
        config: `quantization` of the file.
        quantized: module names of the linears that have a scale.
        read: gives a stored tensor by name.

    Raises:
        ModelError: it tells of something else than the layout holds.
    """
    algorithm, group = config.get("quant_algo"), config.get("group_size")
    text = next((text for text, name in _WHOLE.items() if name == algorithm and group in (None, 128)), None)
    if algorithm == "W4A16_AWQ" and type(group) is int and group in (64, 128) and not config.get("has_zero_point"):
        text = f"int4-g{group}-sym"
    if text is None:
        raise ModelError(f"{FILE} tells of {algorithm!r} with a group_size of {group!r}; W4A16_AWQ of 64 or 128 without zero points, {', '.join(_WHOLE.values())} are readable")
    scheme, scales = parse(text), "weight_scale_inv" if algorithm == "FP8_BLOCK_SCALES" else "weight_scale"
    return {name: replace(scheme, scale=ScaleFormat(narrowest(read(f"{name}.{scales}")))) for name in quantized}
