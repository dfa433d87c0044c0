"""What one step computes, as flat arrays: the seam between scheduling and running. There is no prefill or decode type.

Letters: T tokens of the step, S sequences, L rows whose logits are wanted, M most blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from qforge.runtime.scheduler import Piece


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Attributes:
    tokens: `[T]` int64, all sequences' tokens one after the other.
    positions: `[T]` int64, each token's place in its sequence.
    slot_mapping: `[T]` int64, block x block_size + offset: where its key and value go.
    block_tables: `[S, M]` int32, each sequence's blocks, filled up with 0.
    query_starts: `[S + 1]` int32, where each sequence's tokens start in `tokens`.
    context_lens: `[S]` int32, tokens of each sequence that are in the cache after this step.
    logit_indices: `[L]` int64, rows of the step whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    logit_indices: torch.Tensor


class Runner(Protocol):
    """Computes steps; it owns the weights and the cache."""

    def step(self, step: StepInput) -> torch.Tensor:
        """Write the step's keys and values into the cache and return fp32 logits `[L, V]`."""


def build_step(pieces: list[Piece], block_size: int, *, all_logits: bool = False) -> StepInput:
    """Flatten scheduled pieces. `all_logits`: logits of every token, not only of last ones."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, wanted = [0], list[int]()
    for piece in pieces:
        table = piece.sequence.block_table
        tokens += piece.sequence.tokens[piece.start : piece.stop]
        positions += range(piece.start, piece.stop)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(piece.start, piece.stop)]
        starts.append(len(tokens))
        wanted += range(starts[-2], starts[-1]) if all_logits else [len(tokens) - 1] if piece.wants_logits else []
    widest = max(len(p.sequence.block_table) for p in pieces)
    tables = [p.sequence.block_table + [0] * (widest - len(p.sequence.block_table)) for p in pieces]
    return StepInput(
        torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), torch.tensor(tables, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32), torch.tensor([p.stop for p in pieces], dtype=torch.int32), torch.tensor(wanted, dtype=torch.int64),
    )  # fmt: skip
