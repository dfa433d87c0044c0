"""What one step computes, as flat arrays: the seam between scheduling and running. There is no prefill or decode type. Standard library only.

Letters: T tokens of the step, S sequences, L rows whose logits are wanted, M most blocks of a sequence.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Draw

if TYPE_CHECKING:
    import torch

    from qforge.types import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Arrays of 64 bits (`q`) and 32 (`i`); numpy's `asarray` takes them as they are.

    Attributes:
    tokens: `[T]` int64, all sequences' tokens one after the other.
    positions: `[T]` int64, each token's place in its sequence.
    slot_mapping: `[T]` int64, block x block_size + offset: where its key and value go.
    block_tables: `[S x M]` int32, each sequence's blocks, filled up with 0.
    query_starts: `[S + 1]` int32, where each sequence's tokens start in `tokens`.
    context_lens: `[S]` int64, tokens of each sequence that are in the cache after this step, guesses included.
    logit_indices: `[L]` int64, rows of the step whose logits are wanted, rising.
    """

    tokens: array[int]
    positions: array[int]
    slot_mapping: array[int]
    block_tables: array[int]
    query_starts: array[int]
    context_lens: array[int]
    logit_indices: array[int]


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
    """Flatten scheduled pieces. Without numpy, a call of which takes 5 to 10 us after a step that has used up the caches."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    wanted: list[int] = []
    for piece in pieces:
        sequence, start, stop, draft = piece
        table = sequence.block_table
        if stop - start == 1 and not draft and stop == len(sequence.tokens):  # as nearly all are
            wanted.append(len(tokens))
            tokens.append(sequence.tokens[start])
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            tokens += sequence.tokens[start:stop]
            tokens += draft
            stop = piece.end
            positions += range(start, stop)
            for block in range(start // block_size, (stop - 1) // block_size + 1):
                moved = (table[block] - block) * block_size
                slots += range(max(start, block * block_size) + moved, min(stop, (block + 1) * block_size) + moved)
            wanted += range(len(tokens) - (stop - piece.wanted), len(tokens))
        starts.append(len(tokens))
    return StepInput(
        array("q", tokens), array("q", positions), array("q", slots), _tables([p.sequence.block_table for p in pieces]), array("i", starts),
        array("q", [p.end for p in pieces]), array("q", wanted),
    )  # fmt: skip


def _tables(held: list[list[int]]) -> array[int]:
    longest = max(map(len, held))
    tables = array("i")
    for blocks in held:
        tables.fromlist(blocks)
        if len(blocks) < longest:
            tables.frombytes(bytes(4 * (longest - len(blocks))))
    return tables
