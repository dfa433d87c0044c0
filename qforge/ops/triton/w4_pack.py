"""Transcribe integer weights of up to 4 bits into the words that the GPU kernels read, and back.

Letters: O outputs, I inputs, P inputs padded to a multiple of 128, G groups, S = P/128 steps.

A step's 128 inputs of an output are 16 words. Words 2 c and 2 c + 1 have inputs 16 j + 2 c and 16 j + 2 c + 1, the first for j = 0 .. 3, the second for j = 4 .. 7: in nibbles
j % 4 and j % 4 + 4. A shift and one mask give two neighbours in the halves of a register (kernels of Marlin, arXiv 2408.11743, section 3.4), and the j-th of all are 16 inputs in a
row: an operand of the tensor cores, where it belongs. Steps come first, so that what a block of threads reads at once lies together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qforge.ops.triton.tiles import new_turns
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, ScaleType, Symmetry

STEP = 128  # inputs
_WORDS = STEP // 8
_SHORTEST_RUN = 16  # inputs of one tensor-core product, which share a scale
SYMMETRIC_ZERO = 8  # what symmetric codes are stored plus


@dataclass(frozen=True, slots=True, eq=False)
class W4:
    """A packed weight.

    Attributes:
        words: `[S, O, 16]` int32.
        scales: `[G, O]`, fp16 or bf16 if the scheme stores them so, else fp32; with padded inputs, groups of these alone have scales of 0.
        zeros: `[G, O]` uint8, None for symmetric codes (which are stored plus 8).
        order: `[I]` int64, the input that stands at each packed place; None if they stand as they are.
        bias: `[O]` fp32 or None.
        group: inputs that share a scale; P for one scale a row.
        turns: see `new_turns`.
        either: whether every scale is a number of fp16 and of bf16 alike.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    bias: torch.Tensor | None
    in_features: int
    group: int
    turns: torch.Tensor
    either: bool

    @property
    def out_features(self) -> int:
        """O, output features."""
        return int(self.words.shape[1])

    @property
    def steps(self) -> int:
        """S, steps of 128 inputs."""
        return int(self.words.shape[0])


def longest_step(group: int) -> int:
    """The largest power of two that divides a group."""
    return group & -group


def unpackable(group: int) -> str | None:
    """None, or why weights with groups of so many inputs are not packed."""
    return None if longest_step(group) >= _SHORTEST_RUN else f"groups of {group} inputs are not a multiple of {_SHORTEST_RUN}"


def pack_w4(q: QuantizedLinear) -> W4:
    """Pack codes `[O, I]` of integers up to 4 bits per group, channel or tensor, symmetric or with integer zero points. Group indices must fill groups equally."""
    padded = -(-q.in_features // STEP) * STEP
    group = q.scheme.granularity.columns if q.scheme.granularity.per is Per.GROUP else padded
    order = None if q.group_index is None else torch.argsort(q.group_index.long(), stable=True)
    codes = q.codes.to(torch.int32) + (SYMMETRIC_ZERO if q.zeros is None else 0)
    codes = torch.nn.functional.pad(codes if order is None else codes[:, order], (0, padded - q.in_features))
    dtype = {ScaleType.BF16: torch.bfloat16, ScaleType.F16: torch.float16, ScaleType.F16BF16: torch.float16}.get(q.scheme.scale.type, torch.float32)
    groups = -(-padded // group)
    zeros = None if q.zeros is None else _per_output(q.zeros, q.out_features, groups)
    scales = _per_output(q.scales, q.out_features, groups).to(dtype)
    return W4(
        pack_words(codes),
        scales,
        zeros,
        order,
        None if q.bias is None else q.bias.float(),
        q.in_features,
        group,
        new_turns(q.codes.device),
        either=all(torch.equal(scales.to(t).float(), scales.float()) for t in (torch.float16, torch.bfloat16)),
    )


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[O, P]` in 0..15 -> `[S, O, 16]` int32."""
    parts = codes.view(codes.shape[0], -1, 2, 4, _WORDS // 2, 2).to(torch.int64)  # [O, S, half of a pair, j % 4, pair, neighbour]
    words = sum(parts[:, :, :, i, :, n] << (4 * i + 16 * n) for i in range(4) for n in range(2))
    assert isinstance(words, torch.Tensor)
    return (words - ((words >> 31) << 32)).to(torch.int32).permute(1, 0, 3, 2).flatten(2).contiguous()


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """`[S, O, 16]` int32 -> codes `[O, P]` uint8; undoes `pack_words`."""
    pairs = words.unflatten(2, (-1, 2))[..., None, None]  # [S, O, pair, half, 1, 1]
    shifts = torch.arange(0, 16, 4, device=words.device)[:, None] + torch.tensor([0, 16], device=words.device)  # [j % 4, neighbour]
    codes: torch.Tensor = (pairs >> shifts) & 15
    return codes.permute(1, 0, 3, 4, 2, 5).flatten(1).to(torch.uint8)


def unpack_w4(w: W4, symmetry: Symmetry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes `[O, I]`, scales `[O, G]` fp32, zeros `[O, G]` or None) as `QuantizedLinear` has them; undoes `pack_w4` but for its gathering by group index."""
    codes, groups = unpack_words(w.words)[:, : w.in_features], -(-w.in_features // w.group)
    codes = (codes.to(torch.int8) - SYMMETRIC_ZERO) if symmetry is Symmetry.SYM else codes
    return codes, w.scales[:groups].float().T.contiguous(), None if w.zeros is None else w.zeros[:groups].T.contiguous()


def _per_output(values: torch.Tensor, out_features: int, groups: int) -> torch.Tensor:
    """`[R, C] -> [groups, O]`: one column for each output, whatever shared it."""
    each = values.expand(out_features, -1).T
    return torch.nn.functional.pad(each, (0, 0, 0, groups - len(each))).contiguous()
