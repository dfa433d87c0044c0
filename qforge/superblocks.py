"""What GGUF's block types hold: integer codes, and scales (with minima or without) that may themselves be integers under one fp16 scale for 256 inputs.

    Q4_0 Q5_0 Q8_0     value = d * q             one d for 32 inputs
    Q4_1 Q5_1          value = d * q + m         one d and one m for 32 inputs
    Q3_K Q6_K          value = d * s * q         d for 256 inputs, an integer s for 16
    Q2_K Q4_K Q5_K     value = d * s * q - dmin * m     d and dmin for 256 inputs, integers s and m for 16 or 32

Source: ggml's `ggml-common.h` and `ggml-quants.c`.

Letters: N blocks, S groups of a block, G inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockType:
    """One block type.

    Attributes:
        name: ggml's.
        block: inputs of a block, S * G.
        group: inputs that share a scale, G.
        codes: smallest and largest code.
        scales: smallest and largest integer scale; None where each scale is an fp16 number of its own.
        minimum: whether each group also has a minimum: added where scales are fp16 numbers, else subtracted, an integer from 0 on.
        nbytes: of a block in a file.
    """

    name: str
    block: int
    group: int
    codes: tuple[int, int]
    scales: tuple[int, int] | None
    minimum: bool
    nbytes: int

    @property
    def groups(self) -> int:
        """Groups of a block, S."""
        return self.block // self.group


TYPES = {
    t.name: t
    for t in (
        BlockType("Q4_0", 32, 32, (-8, 7), None, False, 18),
        BlockType("Q4_1", 32, 32, (0, 15), None, True, 20),
        BlockType("Q5_0", 32, 32, (-16, 15), None, False, 22),
        BlockType("Q5_1", 32, 32, (0, 31), None, True, 24),
        BlockType("Q8_0", 32, 32, (-128, 127), None, False, 34),
        BlockType("Q2_K", 256, 16, (0, 3), (0, 15), True, 84),
        BlockType("Q3_K", 256, 16, (-4, 3), (-32, 31), False, 110),
        BlockType("Q4_K", 256, 32, (0, 15), (0, 63), True, 144),
        BlockType("Q5_K", 256, 32, (0, 31), (0, 63), True, 176),
        BlockType("Q6_K", 256, 16, (-32, 31), (-128, 127), False, 210),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Superblocks:
    """N blocks of one type.

    Attributes:
        type: of all of them.
        codes: int16 `[N, S, G]`.
        d: fp16 `[N]`.
        scales: int16 `[N, S]`; None where `type.scales` is.
        dmin: fp16 `[N]`, the scale of the minima (or the minimum itself, where scales are fp16 numbers); None without minima.
        minima: int16 `[N, S]`; None where `scales` is, or without minima.
    """

    type: BlockType
    codes: torch.Tensor
    d: torch.Tensor
    scales: torch.Tensor | None = None
    dmin: torch.Tensor | None = None
    minima: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """fp32 `[N, S, G]`, each operation rounded as ggml's C code rounds it."""
        d = self.d.float()[:, None] if self.scales is None else self.d.float()[:, None] * self.scales
        product = d[..., None] * self.codes
        if self.dmin is None:
            return product
        return product + self.dmin.float()[:, None, None] if self.minima is None else product - (self.dmin.float()[:, None] * self.minima)[..., None]

    def equals(self, other: Superblocks) -> bool:
        """Whether every field is equal bit for bit."""
        if self.type != other.type:
            return False
        pairs = [(getattr(self, n), getattr(other, n)) for n in ("codes", "d", "scales", "dmin", "minima")]
        return all((a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b))) for a, b in pairs)
