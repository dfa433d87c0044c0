"""What one step computes, as flat arrays: the seam between scheduling and running. There is no prefill or decode type.

Letters: T tokens of the step, S sequences, L rows whose logits are wanted, M most blocks of a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Draw
from qforge.types import ModelSpec

if TYPE_CHECKING:
    import torch

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Attributes:
    tokens: `[T]` int64, all sequences' tokens one after the other.
    positions: `[T]` int64, each token's place in its sequence.
    slot_mapping: `[T]` int64, block x block_size + offset: where its key and value go.
    block_tables: `[S, M]` int32, each sequence's blocks, filled up with 0.
    query_starts: `[S + 1]` int32, where each sequence's tokens start in `tokens`.
    context_lens: `[S]` int64, tokens of each sequence that are in the cache after this step, guesses included.
    logit_indices: `[L]` int64, rows of the step whose logits are wanted, rising.
    """

    tokens: Longs
    positions: Longs
    slot_mapping: Longs
    block_tables: Ints
    query_starts: Ints
    context_lens: Longs
    logit_indices: Longs


class Runner(Protocol):
    """Computes steps; it owns the weights and the cache.

    Attributes:
        batch_invariant: whether a token's logits have the same bits whatever a step computes besides.
    """

    spec: ModelSpec
    batch_invariant: bool

    def step(self, step: StepInput) -> torch.Tensor:
        """Write the step's keys and values into the cache and return fp32 logits `[L, V]`."""

    def choose(self, step: StepInput, draws: list[Draw]) -> list[int]:
        """The same, and the token of each of `[L]` draws, one for each row whose logits are wanted, as `sampler.sample` chooses it."""

    def kernels(self) -> dict[str, int]:
        """How many products each kernel runs."""

    def weight_bytes(self) -> int:
        """Bytes of weights that a step with one token reads."""


def build_step(pieces: list[Piece], block_size: int) -> StepInput:
    """Flatten scheduled pieces. Lists, since a call of numpy takes 10 us after a step that has used up the caches."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    wanted: list[int] = []
    for piece in pieces:
        start, stop, table = piece.start, piece.stop, piece.sequence.block_table
        tokens += piece.sequence.tokens[start:stop]
        tokens += piece.draft
        stop = piece.end
        positions += range(start, stop)
        for block in range(start // block_size, (stop - 1) // block_size + 1):
            moved = (table[block] - block) * block_size
            slots += range(max(start, block * block_size) + moved, min(stop, (block + 1) * block_size) + moved)
        starts.append(len(tokens))
        wanted += range(len(tokens) - (stop - piece.wanted), len(tokens))
    return StepInput(
        _longs(tokens), _longs(positions), _longs(slots), _tables([p.sequence.block_table for p in pieces]), _ints(starts), _longs(p.end for p in pieces),
        _longs(wanted),
    )  # fmt: skip


def _longs(values: Iterable[int]) -> Longs:
    return np.frombuffer(array("q", values), np.int64)


def _ints(values: Iterable[int]) -> Ints:
    return np.frombuffer(array("i", values), np.int32)


def _tables(held: list[list[int]]) -> Ints:
    longest = max(map(len, held))
    return np.frombuffer(bytearray().join(array("i", blocks).tobytes().ljust(4 * longest, b"\0") for blocks in held), np.int32).reshape(len(held), longest)
