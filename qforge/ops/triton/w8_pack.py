"""Transcribe 8-bit weights with 8-bit activations for the GPU kernels.

Letters: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qforge.numerics import largest
from qforge.ops.triton.tiles import new_turns
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Per, Scheme


@dataclass(frozen=True, slots=True, eq=False)
class W8:
    """A packed weight.

    Attributes:
        codes: `[O, I]` int8 or float8_e4m3fn.
        scales: `[G, O]` fp32.
        bias: `[O]` fp32 or None.
        group: inputs that share a scale of the weight; I for one scale a row.
        input_group: inputs that share a scale of the activations; 0 for a whole token.
        limit: the magnitude of activations that a scale of 1 stands for.
        turns: see `new_turns`.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    group: int
    input_group: int
    limit: float
    turns: torch.Tensor

    @property
    def out_features(self) -> int:
        """O, output features."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """I, input features."""
        return int(self.codes.shape[1])

    @property
    def is_int(self) -> bool:
        """Whether codes are integers, else floats."""
        return self.codes.dtype == torch.int8


def pack_w8(q: QuantizedLinear) -> W8:
    """Pack codes `[O, I]`: symmetric integers up to 8 bits or e4m3; per tensor, channel, group or block, groups in order."""
    a, g = q.scheme.activations, q.scheme.granularity
    assert a is not None
    rows = {Per.TENSOR: q.out_features, Per.BLOCK: g.rows}.get(g.per, 1)
    scales = q.scales.repeat_interleave(rows, 0)[: q.out_features].T.contiguous()
    codes = q.codes if q.scheme.number.is_int else q.codes.view(torch.float8_e4m3fn)
    return W8(
        codes.contiguous(), scales, None if q.bias is None else q.bias.float(), g.group_size(q.in_features), a.granularity.columns if a.granularity.per is Per.GROUP else 0,
        largest(Scheme(a.number, Granularity(Per.TENSOR))), new_turns(q.codes.device),
    )  # fmt: skip
