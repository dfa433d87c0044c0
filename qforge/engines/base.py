"""What every engine that scores token windows offers, and the positions of one piece of scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

CHUNK = 128  # positions a piece: 128 x 262,144 tokens of vocabulary in fp32 are 134 MB


class Scorer(Protocol):
    """Something that gives next-token logits of token windows.

    Attributes:
        name: the engine's name as reports print it (`qforge`, `transformers`, `llama.cpp`).
        version: the engine's version.
    """

    name: str
    version: str

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """Yield fp32 logits `[c, V]`: for each window in turn, its positions `chunks(len(window))`, so that a whole `[length, V]` need never exist."""


def chunks(length: int) -> list[tuple[int, int]]:
    """The positions that a window of `length` tokens is scored at, 0 .. length - 2, as half-open pieces `(start, stop)` of at most 128."""
    return [(start, min(start + CHUNK, length - 1)) for start in range(0, length - 1, CHUNK)]
