"""How finished blocks, and the hidden states after them, are kept and found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from qforge.qlinear import QuantizedLinear
from qforge.types import LayerResult


class Held(Protocol):
    """A tensor that is read when it is wanted."""

    dtype: torch.dtype
    shape: torch.Size

    def load(self) -> torch.Tensor:
        """The tensor."""


Hidden = Mapping[str, Held]


@dataclass(frozen=True, slots=True)
class Piece:
    """One finished block: its quantized linears by module name, and what the report says of each.

    `tensors` are those of the block's other tensors that transforms changed, by full name: fp32, exact in the type in which the model stores them.
    """

    linears: dict[str, QuantizedLinear]
    layers: list[LayerResult]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Store:
    """How finished work is kept; index `num_blocks` stands for the output head.

    Attributes:
        load: a finished block's piece, or None.
        save: keep a block's piece.
        load_hidden: hidden states after block `index`, or None.
        save_hidden: keep them (and forget those of earlier blocks).
        hidden_every: seconds that pass at least before hidden states are kept again; a resumed run replays the finished blocks since then.
    """

    load: Callable[[int], Piece | None]
    save: Callable[[int, Piece], None]
    load_hidden: Callable[[int], Hidden | None]
    save_hidden: Callable[[int, Hidden], None]
    hidden_every: float = 20.0
