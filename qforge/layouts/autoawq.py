"""The AWQ checkpoint layout (AutoAWQ's "GEMM" version, which GPTQModel, transformers and vLLM read): qweight, qzeros, scales.

    qweight  int32 [I, O / 8]     codes, unsigned 4-bit, packed along the outputs; nibble i of a word is output `ORDER[i]` of its eight
    qzeros   int32 [C, O / 8]     zero points, as they are, packed like the codes
    scales   fp16  [C, O]

A symmetric weight is one whose zero points are all 8: readers differ in what they make of `zero_point: false`, and none of them misreads an 8.

Letters: O output features, I input features, C groups in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.layouts.base import expect_contiguous, expect_finite, expect_shape, half_problem, half_scales, signed, take_matrix, unsigned
from qforge.layouts.bits import pack_words, unpack_words
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

NAME = "AWQ"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS, _WORD, _MIDDLE = 4, 8, 8


@dataclass(frozen=True, slots=True)
class AutoAwq:
    """The layout (see `qforge.layouts.base.Layout`)."""

    name: str = NAME

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if scheme.number is not Number.INT4:
            return f"an AWQ checkpoint holds int4, not {scheme.number}"
        if scheme.granularity.per not in (Per.GROUP, Per.CHANNEL):
            return f"an AWQ checkpoint has one scale per group or per channel, not per {scheme.granularity.per}"
        if scheme.symmetry is Symmetry.OFFSET:
            return "an AWQ checkpoint has integer zero points, no offsets"
        if scheme.activations is not None:
            return "an AWQ checkpoint cannot say that activations are rounded"
        return half_problem(scheme, "an AWQ checkpoint")

    def problem_with(self, out_features: int) -> str | None:
        """Why a weight with so many outputs has no whole words in the layout; None if it has."""
        return f"{out_features} outputs of {_BITS} bits do not fill whole 32-bit words" if out_features % _WORD else None

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        columns = scheme.scale_shape(out_features, in_features)[1]
        return {
            "qweight": ((in_features, out_features // _WORD), torch.int32),
            "qzeros": ((columns, out_features // _WORD), torch.int32),
            "scales": ((columns, out_features), torch.float16),
        }

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The three tensors.

        Raises:
            UnsupportedError: a scale is not exact in fp16, or the groups are not contiguous (act-order).
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, "an AWQ checkpoint", "; export gptq can")
        scales, (codes, zeros) = half_scales(q, "an AWQ checkpoint"), unsigned(q, _BITS)
        return {"qweight": _pack(codes), "qzeros": _pack(zeros), "scales": scales.T.contiguous()}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the tensors describe.

        Raises:
            ModelError: a tensor is missing, its shape or type does not fit the scheme, or a symmetric scheme meets other zero points than 8.
        """
        scales = expect_finite(take_matrix(tensors, "scales", NAME, torch.float16, torch.bfloat16, torch.float32), "scales", NAME).T.contiguous()
        qweight, qzeros = take_matrix(tensors, "qweight", NAME, torch.int32), take_matrix(tensors, "qzeros", NAME, torch.int32)
        out_features, in_features = qweight.shape[1] * _WORD, qweight.shape[0]
        shape = scheme.scale_shape(out_features, in_features)
        expect_shape(scales, shape, "scales (transposed)", NAME)
        expect_shape(qzeros, (shape[1], qweight.shape[1]), "qzeros", NAME)
        codes, zeros = _unpack(qweight), _unpack(qzeros)
        if not scheme.symmetric:
            return QuantizedLinear(scheme, codes, scales, zeros, bias=tensors.get("bias"))
        if not (zeros == _MIDDLE).all():
            raise ModelError(f"an AWQ weight read as symmetric has the zero point {zeros[zeros != _MIDDLE][0]} where all should be {_MIDDLE}")
        return QuantizedLinear(scheme, signed(codes, _BITS), scales, None, bias=tensors.get("bias"))


def read_config(config: Mapping[str, Any], quantized: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from the `quantization_config` of an AWQ checkpoint; whether one is symmetric is seen in its zero points.

    Args:
        config: `quantization_config` of config.json, under AutoAWQ's names or transformers'.
        quantized: module names of the linears that have a `qweight`.
        read: gives a stored tensor by name.

    Raises:
        ModelError: the config is malformed, or describes another kind of AWQ checkpoint.
    """
    bits, group = config.get("bits", config.get("w_bit", _BITS)), config.get("group_size", config.get("q_group_size", 128))
    if type(bits) is not int or bits != _BITS or type(group) is not int or not (group == -1 or 0 < group < 1 << 31):
        raise ModelError(f"an AWQ checkpoint of {bits!r} bits in groups of {group!r} is not readable; {_BITS} bits and a group size or -1 are")
    version = str(config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm").lower()
    if version != "gemm" or config.get("backend") == "llm-awq":
        raise ModelError(f"this AWQ checkpoint is packed for '{config['backend'] if version == 'gemm' else version}'; qforge reads the common 'gemm' packing")
    granularity = Granularity(Per.CHANNEL) if group == -1 else Granularity(Per.GROUP, group, 1)
    asymmetric = Scheme(Number.INT4, granularity, Symmetry.ASYM, ScaleFormat(ScaleType.F16))
    symmetric = Scheme(Number.INT4, granularity, Symmetry.SYM, ScaleFormat(ScaleType.F16))
    return {name: symmetric if (_unpack(take_matrix({"qzeros": read(f"{name}.qzeros")}, "qzeros", NAME, torch.int32)) == _MIDDLE).all() else asymmetric for name in quantized}


def _pack(values_OX: torch.Tensor) -> torch.Tensor:
    """Words `[X, O / 8]` of values `[O, X]` uint8."""
    x, words = values_OX.T, values_OX.shape[0] // _WORD
    return pack_words(x.reshape(-1, words, _WORD)[..., list(ORDER)].flatten(1), _BITS, dim=1)


def _unpack(words_XW: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack`."""
    packed = unpack_words(words_XW, _BITS, words_XW.shape[1] * _WORD, dim=1).view(-1, words_XW.shape[1], _WORD)
    values = torch.empty_like(packed)
    values[..., list(ORDER)] = packed
    return values.flatten(1).T.contiguous()
