"""The checkpoint layout of Ascend's tools (msmodelslim writes it, MindIE and vllm-ascend read it): symmetric integers of 4 or 8 bits.

    weight          int8 [O, I]; 4 bits with groups: [O / 2, I], two outputs in a byte; 4 bits with one scale a row: [O, I / 2], two inputs in a byte; the first in the low half
    weight_scale    fp32 [O, C]
    weight_offset   fp32 [O, C], zeros

Source: msmodelslim 26.1, `ascendv1.py` and `complex_quantifier.py` (`_w4a16_pack_int4`).

Letters: O output features, I input features, C groups in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.layouts.base import expect_contiguous, expect_finite, expect_shape, narrowest, take_matrix
from qforge.layouts.bits import pack_nibbles, pack_pairs_of_rows, unpack_nibbles, unpack_pairs_of_rows
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Number, Per, ScaleFormat, Scheme, parse

FILE = "quant_model_description.json"
_TOKEN = "int8-token"


@dataclass(frozen=True, slots=True)
class Ascend:
    """The layout (see `qforge.layouts.base.Layout`)."""

    name: str = "Ascend"

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if scheme.number not in (Number.INT4, Number.INT8) or not scheme.symmetric:
            return f"an {self.name} checkpoint holds symmetric integers of 4 or 8 bits here, not {scheme}"
        if scheme.granularity.per not in (Per.CHANNEL, Per.GROUP):
            return f"an {self.name} checkpoint has one scale per group or per channel, not per {scheme.granularity.per}"
        if scheme.scale.super_granularity is not None:
            return f"an {self.name} checkpoint has one level of scales, not {scheme.scale}"
        if scheme.activations is None:
            return None
        if scheme.number is Number.INT8 and scheme.granularity.per is Per.CHANNEL and str(scheme.activations) == _TOKEN:
            return None
        return f"an {self.name} checkpoint rounds activations by token beside 8-bit weights with one scale per channel (int8-channel-sym+{_TOKEN}), not as {scheme} says"

    @staticmethod
    def kind(scheme: Scheme) -> str:
        """Ascend's name of a scheme that `supports` has passed."""
        return "W8A8_DYNAMIC" if scheme.activations is not None else f"W{scheme.bits}A16"

    def problem_with(self, scheme: Scheme, out_features: int, in_features: int) -> str | None:
        """Why a weight of this shape does not fill whole bytes; None if it does."""
        halved, what = (out_features, "outputs") if scheme.granularity.per is Per.GROUP else (in_features, "inputs")
        return f"{halved} {what} of 4 bits do not fill whole bytes" if scheme.bits == 4 and halved % 2 else None

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor."""
        weight = (out_features, in_features)
        if scheme.bits == 4:
            weight = (out_features // 2, in_features) if scheme.granularity.per is Per.GROUP else (out_features, in_features // 2)
        scales = scheme.scale_shape(out_features, in_features)
        return {"weight": (weight, torch.int8), "weight_scale": (scales, torch.float32), "weight_offset": (scales, torch.float32)}

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The three tensors.

        Raises:
            UnsupportedError: groups in activation order.
        """
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        expect_contiguous(q, f"an {self.name} checkpoint")
        weight = q.codes
        if q.scheme.bits == 4:
            low = q.codes.view(torch.uint8) & 0xF
            weight = (pack_pairs_of_rows(low) if q.scheme.granularity.per is Per.GROUP else pack_nibbles(low)).view(torch.int8)
        return {"weight": weight, "weight_scale": q.scales, "weight_offset": torch.zeros_like(q.scales)}

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The inverse of `pack`.

        Raises:
            ModelError: a tensor is missing, or does not fit the scheme.
        """
        codes = take_matrix(tensors, "weight", self.name, torch.int8)
        if scheme.bits == 4:
            raw = codes.contiguous().view(torch.uint8)
            unsigned = unpack_pairs_of_rows(raw) if scheme.granularity.per is Per.GROUP else unpack_nibbles(raw)
            codes = ((unsigned ^ 8).to(torch.int16) - 8).to(torch.int8)
        shape = scheme.scale_shape(*codes.shape)
        scales, offsets = (expect_shape(take_matrix(tensors, n, self.name, torch.float32), shape, n, self.name) for n in ("weight_scale", "weight_offset"))
        if offsets.any():
            raise ModelError(f"this {self.name} weight has offsets, and {scheme} has none")
        return QuantizedLinear(scheme, codes, expect_finite(scales, "weight_scale", self.name), bias=tensors.get("bias"))


def read_config(config: Mapping[str, Any], quantized: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from the content of `quant_model_description.json`.

    Args:
        config: the content.
        quantized: module names of the linears that have a `weight_scale`.
        read: gives a stored tensor by name.

    Raises:
        ModelError: it tells of something else than the layout holds.
    """
    schemes = {}
    for name in quantized:
        kind, group, scales = config.get(f"{name}.weight"), config.get("group_size"), read(f"{name}.weight_scale")
        per = "channel" if scales.shape[1:] == (1,) else f"g{group}"
        if kind not in ("W8A8_DYNAMIC", "W8A16", "W4A16") or (per != "channel" and (type(group) is not int or not 0 < group < 1 << 31 or kind == "W8A8_DYNAMIC")):
            raise ModelError(f"{FILE} says {kind!r} of '{name}' with a group_size of {group!r}; W8A8_DYNAMIC by channel, W8A16 and W4A16 are readable")
        rounded = f"+{_TOKEN}" if kind == "W8A8_DYNAMIC" else ""
        schemes[name] = replace(parse(f"int{str(kind)[1]}-{per}-sym{rounded}"), scale=ScaleFormat(narrowest(scales)))
    return schemes
