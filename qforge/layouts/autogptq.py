"""The GPTQ checkpoint layout (AutoGPTQ, GPTQModel): qweight, qzeros, scales, g_idx.

    qweight  int32 [I * bits / 32, O]      codes, unsigned, packed along the inputs
    qzeros   int32 [C, O * bits / 32]      zero points, packed along the outputs; version 1 stores them minus one, version 2 as they are
    scales   fp16  [C, O]
    g_idx    int32 [I]                     the group of each input

Letters: O output features, I input features, C groups in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qforge.errors import ModelError, UnsupportedError
from qforge.layouts.base import expect_finite, expect_group_index, expect_shape, half_problem, half_scales, signed, take_matrix, unsigned
from qforge.layouts.bits import pack_words, unpack_words, words_for
from qforge.patterns import matches
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

NAME = "GPTQ"
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class AutoGptq:
    """The layout (see `qforge.layouts.base.Layout`); `version` is 1 (`checkpoint_format: gptq`) or 2 (`gptq_v2`)."""

    version: int = 1
    name: str = NAME

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if not scheme.number.is_int or scheme.bits not in BITS:
            return f"a GPTQ checkpoint holds integers of {', '.join(map(str, BITS))} bits, not {scheme.number}"
        if scheme.granularity.per not in (Per.GROUP, Per.CHANNEL):
            return f"a GPTQ checkpoint has one scale per group or per channel, not per {scheme.granularity.per}"
        if scheme.symmetry is Symmetry.OFFSET:
            return "a GPTQ checkpoint has integer zero points, no offsets"
        if scheme.activations is not None:
            return "a GPTQ checkpoint cannot say that activations are rounded"
        return half_problem(scheme, "a GPTQ checkpoint")

    def problem_with(self, out_features: int, in_features: int, bits: int) -> str | None:
        """Why a weight of this shape has no whole words in the layout; None if it has."""
        for width, what in ((in_features, "inputs"), (out_features, "outputs")):
            if width * bits % 32:
                return f"{width} {what} of {bits} bits do not fill whole 32-bit words"
        return None

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        columns = scheme.scale_shape(out_features, in_features)[1]
        return {
            "qweight": ((words_for(in_features, scheme.bits), out_features), torch.int32),
            "qzeros": ((columns, words_for(out_features, scheme.bits)), torch.int32),
            "scales": ((columns, out_features), torch.float16),
            "g_idx": ((in_features,), torch.int32),
        }

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The four tensors.

        Raises:
            UnsupportedError: a scale is not exact in fp16, or version 1 cannot hold a zero point of zero.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        bits, (codes, zeros) = q.scheme.bits, unsigned(q, q.scheme.bits)
        if self.version == 1 and (zeros == 0).any():
            raise UnsupportedError("version 1 of the GPTQ layout stores zero points minus one and has no zero point 0; use version 2")
        scales = half_scales(q, "a GPTQ checkpoint")
        index = q.group_index if q.group_index is not None else _contiguous(q.in_features, q.scheme)
        return {
            "qweight": pack_words(codes.T.contiguous(), bits, dim=0),
            "qzeros": pack_words((zeros - (2 - self.version)).T.contiguous(), bits, dim=1),
            "scales": scales.T.contiguous(),
            "g_idx": index.to(torch.int32),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the tensors describe.

        Raises:
            ModelError: a tensor is missing, its shape does not fit the scheme, or a symmetric checkpoint has other zero points than the middle.
        """
        scales = expect_finite(take_matrix(tensors, "scales", NAME, torch.float16, torch.bfloat16, torch.float32), "scales", NAME).T.contiguous()
        index = tensors.get("g_idx")
        qweight = take_matrix(tensors, "qweight", NAME, torch.int32)
        out_features = scales.shape[0]
        in_features = index.numel() if index is not None else qweight.shape[0] * 32 // scheme.bits
        columns = scheme.scale_shape(out_features, in_features)[1]
        expect_shape(scales, (out_features, columns), "scales (transposed)", NAME)
        expect_shape(qweight, (words_for(in_features, scheme.bits), out_features), "qweight", NAME)
        qzeros = expect_shape(take_matrix(tensors, "qzeros", NAME, torch.int32), (columns, words_for(out_features, scheme.bits)), "qzeros", NAME)
        codes = unpack_words(qweight, scheme.bits, in_features, dim=0).T.contiguous()
        stored = unpack_words(qzeros, scheme.bits, out_features, dim=1)
        zeros = (stored + (2 - self.version)).T.contiguous()
        if index is not None:
            index = expect_group_index(expect_shape(index, (in_features,), "g_idx", NAME), columns, NAME)
            index = None if torch.equal(index, _contiguous(in_features, scheme)) else index
        if not scheme.symmetric:
            most = int(stored.max()) + (2 - self.version)  # 256 does not fit the type of zeros
            if most >> scheme.bits:
                raise ModelError(f"this version 1 GPTQ checkpoint has a zero point of {most}, which means 0 to some programs and {most} to others; convert it to gptq_v2")
            return QuantizedLinear(scheme, codes, scales, zeros, index, bias=tensors.get("bias"))
        middle = 1 << (scheme.bits - 1)
        if not (zeros == middle).all():
            raise ModelError(f"a symmetric GPTQ checkpoint has the zero point {middle} everywhere, but this one has {zeros[zeros != middle][0]}; is it one with sym: false?")
        return QuantizedLinear(scheme, signed(codes, scheme.bits), scales, None, index, bias=tensors.get("bias"))


def version(config: Mapping[str, Any]) -> int:
    """The version of the layout that a `quantization_config` tells of."""
    return 2 if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else 1


def read_config(config: Mapping[str, Any], quantized: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from the `quantization_config` of a GPTQ checkpoint; GPTQModel's rules by module (`dynamic`) included.

    Args:
        config: `quantization_config` of config.json.
        quantized: module names of the linears that have a `qweight`.

    Raises:
        ModelError: the config is malformed, or describes weights that qforge does not read.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(r, Mapping) for r in rules.values()):
        raise ModelError("'dynamic' of a GPTQ checkpoint is not an object of rules by module")
    _scheme(config)
    where, schemes = "'dynamic' of a GPTQ checkpoint", {}
    for name in quantized:
        rule: Mapping[str, Any] = next((r for pattern, r in rules.items() if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), name, where)), {})
        schemes[name] = _scheme({**config, **rule})
    return schemes


def _scheme(settings: Mapping[str, Any]) -> Scheme:
    bits, group = settings.get("bits"), settings.get("group_size", -1)
    if type(bits) is not int or bits not in BITS or type(group) is not int or not (group == -1 or 0 < group < 1 << 31):
        raise ModelError(f"a GPTQ checkpoint of {bits!r} bits in groups of {group!r} is not readable; bits {', '.join(map(str, BITS))} and a group size or -1 are")
    granularity = Granularity(Per.CHANNEL) if group == -1 else Granularity(Per.GROUP, group, 1)
    return Scheme(Number(f"int{bits}"), granularity, Symmetry.SYM if settings.get("sym", True) else Symmetry.ASYM, ScaleFormat(ScaleType.F16))


def _contiguous(in_features: int, scheme: Scheme) -> torch.Tensor:
    return torch.arange(in_features, dtype=torch.int32) // scheme.granularity.group_size(in_features)
