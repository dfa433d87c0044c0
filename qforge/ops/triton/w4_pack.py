"""Transcribe integer weights of up to 4 bits into the words that the GPU kernels read, and back.

Letters: O outputs, I inputs, P padded inputs (a multiple of 128 where one scale covers the row), G groups, W = P/8 words.

Input j of 8 lies in nibble (0, 4, 1, 5, 2, 6, 3, 7)[j] of its word: a shift and one mask give two neighbours in the halves of a register
(kernels of Marlin, arXiv 2408.11743, section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, ScaleType, Symmetry

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
PADDING = 128  # inputs: the longest step of any shipped configuration
_SHORTEST_STEP = 16  # inputs of one tensor-core product
SYMMETRIC_ZERO = 8  # what symmetric codes are stored plus


@dataclass(frozen=True, slots=True, eq=False)
class W4:
    """A packed weight.

    Attributes:
        words: `[O, W]` int32.
        scales: `[G, O]`, fp16 or bf16 if the scheme stores them so, else fp32.
        zeros: `[G, O]` uint8, None for symmetric codes (which are stored plus 8).
        order: `[I]` int64, the input that stands at each packed place; None if they stand as they are.
        bias: `[O]` fp32 or None.
        group: inputs that share a scale; P for one scale a row.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    group: int


def longest_step(group: int) -> int:
    """The largest power of two that divides a group."""
    return group & -group


def unpackable(group: int) -> str | None:
    """None, or why weights with groups of so many inputs are not packed."""
    return None if longest_step(group) >= _SHORTEST_STEP else f"groups of {group} inputs are not a multiple of {_SHORTEST_STEP}"


def pack_w4(q: QuantizedLinear) -> W4:
    """Pack codes `[O, I]` of integers up to 4 bits per group, channel or tensor, symmetric or with integer zero points. Group indices must fill groups equally."""
    per_group = q.scheme.granularity.per is Per.GROUP
    padded = q.in_features if per_group else -(-q.in_features // PADDING) * PADDING
    order = None if q.group_index is None else torch.argsort(q.group_index.long(), stable=True)
    codes = q.codes.to(torch.int32) + (SYMMETRIC_ZERO if q.zeros is None else 0)
    codes = torch.nn.functional.pad(codes if order is None else codes[:, order], (0, padded - q.in_features))
    dtype = {ScaleType.BF16: torch.bfloat16, ScaleType.F16: torch.float16, ScaleType.F16BF16: torch.float16}.get(q.scheme.scale.type, torch.float32)
    scales = _per_output(q.scales, q.out_features).to(dtype)
    return W4(
        pack_words(codes), scales, None if q.zeros is None else _per_output(q.zeros, q.out_features), order, None if q.bias is None else q.bias.float(),
        q.out_features, q.in_features, q.scheme.granularity.columns if per_group else padded,
    )  # fmt: skip


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[O, P]` in 0..15 -> `[O, W]` int32."""
    eights = codes.view(codes.shape[0], -1, 8).to(torch.int64)
    words = sum(eights[:, :, j] << (4 * nibble) for j, nibble in enumerate(NIBBLES))
    assert isinstance(words, torch.Tensor)
    return (words - ((words >> 31) << 32)).to(torch.int32).contiguous()


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """`[O, W]` int32 -> codes `[O, P]` uint8; undoes `pack_words`."""
    return torch.stack([(words >> (4 * nibble)) & 15 for nibble in NIBBLES], -1).flatten(1).to(torch.uint8)


def unpack_w4(w: W4, symmetry: Symmetry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes `[O, I]`, scales `[O, G]` fp32, zeros `[O, G]` or None) as `QuantizedLinear` has them; undoes `pack_w4` but for its gathering by group index."""
    codes = unpack_words(w.words)[:, : w.in_features]
    codes = (codes.to(torch.int8) - SYMMETRIC_ZERO) if symmetry is Symmetry.SYM else codes
    return codes, w.scales.float().T.contiguous(), None if w.zeros is None else w.zeros.T.contiguous()


def _per_output(values: torch.Tensor, out_features: int) -> torch.Tensor:
    """`[R, C] -> [C, O]`: one column for each output, whatever shared it."""
    return values.expand(out_features, -1).T.contiguous()
