"""What one step computes, as flat arrays: the seam between scheduling and running. There is no prefill or decode type.

Letters: T tokens of the step, S sequences, L rows whose logits are wanted, M most blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Sequence
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
    context_lens: `[S]` int64, tokens of each sequence that are in the cache after this step.
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
    """Computes steps; it owns the weights and the cache."""

    spec: ModelSpec

    def step(self, step: StepInput) -> torch.Tensor:
        """Write the step's keys and values into the cache and return fp32 logits `[L, V]`."""

    def choose(self, step: StepInput, sequences: list[Sequence]) -> list[int]:
        """The same, and the next token of each of the `[L]` sequences whose logits are wanted, as `sampler.sample` chooses it."""

    def kernels(self) -> dict[str, int]:
        """How many products each kernel runs."""

    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""


def build_step(pieces: list[Piece], block_size: int, *, all_logits: bool = False) -> StepInput:
    """Flatten scheduled pieces. `all_logits`: logits of every token, not only of last ones."""
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece.sequence.tokens[piece.start : piece.stop]
    first = np.array([p.start for p in pieces], np.int64)
    stops = np.array([p.stop for p in pieces], np.int64)
    starts = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(stops - first, out=starts[1:])
    rows = np.repeat(np.arange(len(pieces)), stops - first)
    positions = np.arange(len(tokens)) + (first - starts[:-1])[rows]
    tables = _tables(pieces)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    wanted = np.arange(len(tokens)) if all_logits else starts[1:][np.array([p.wants_logits for p in pieces])].astype(np.int64) - 1
    return StepInput(np.array(tokens, np.int64), positions, slots, tables, starts, stops, wanted)


def _tables(pieces: list[Piece]) -> Ints:
    held: list[Any] = [p.sequence.block_table for p in pieces]
    tables = np.zeros((len(held), max(map(len, held))), np.int32)
    for row, blocks in zip(tables, held, strict=True):
        row[: len(blocks)] = blocks
    return tables
