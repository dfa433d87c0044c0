"""Which tokens of which sequences the next step computes: continuous batching over a pool of cache blocks. Standard library only.

At every step finished sequences leave and waiting ones enter, first come first served. Long prompts are computed in pieces, so that others go on meanwhile.
When the pool runs out, the youngest running sequence gives its blocks back and is computed again later; its tokens stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from qforge.errors import DataError
from qforge.runtime.blocks import BlockPool
from qforge.runtime.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `[start, stop)` of one sequence, to be computed in this step, and guesses at what comes after its last one."""

    sequence: Sequence
    start: int
    stop: int
    draft: tuple[int, ...] = ()

    @property
    def wants_logits(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one can be chosen."""
        return self.stop == len(self.sequence.tokens)

    @property
    def end(self) -> int:
        """Where the guesses end, too."""
        return self.stop + len(self.draft)


Guess = Callable[[Sequence, int, int], list[int]]  # tokens that a sequence may go on with, at most so many, in a step that has so many already


class Scheduler:
    """Holds the waiting and the running sequences."""

    def __init__(self, pool: BlockPool, block_size: int, max_num_seqs: int, max_step_tokens: int) -> None:
        self.pool, self.block_size = pool, block_size
        self._max_num_seqs, self._max_step_tokens = max_num_seqs, max_step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            DataError: even alone, with all tokens that it may reach, it would not fit the pool.
        """
        needed = self._blocks_for(sequence.limit)
        if needed > self.pool.total:
            raise DataError(
                f"a request of {sequence.num_prompt} prompt tokens and up to {sequence.limit - sequence.num_prompt} new ones needs {needed} cache blocks of "
                f"{self.block_size} tokens, and the pool has {self.pool.total}; give the runtime more blocks, or lower max_tokens"
            )
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state; others are not touched."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)
        sequence.finish_reason = FinishReason.CANCELLED

    def schedule(self, guess: Guess | None = None) -> list[Piece]:
        """The pieces of the next step, at most `max_step_tokens` tokens, blocks allocated; empty when there is nothing to do.

        `guess`: what it gives takes what is left of the step and of the pool.
        """
        budget = self._max_step_tokens
        pieces: list[Piece] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            piece = self._grow(sequence, budget) if sequence in self.running else None  # an older one may have preempted it just now
            if piece is not None:
                pieces.append(piece)
                budget -= piece.stop - piece.start
        while self.waiting and budget and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if self._blocks_for(len(sequence.tokens)) > self.pool.num_free:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            piece = self._grow(sequence, budget)
            assert piece is not None
            pieces.append(piece)
            budget -= piece.stop - piece.start
        if guess is not None:
            for i, piece in enumerate(pieces):
                if budget and piece.wants_logits:
                    pieces[i] = self._with_draft(piece, guess, budget)
                    budget -= len(pieces[i].draft)
        return pieces

    def advance(self, pieces: list[Piece]) -> None:
        """Note that a step's pieces are computed."""
        for piece in pieces:
            piece.sequence.computed = piece.stop

    def keep(self, piece: Piece, right: int) -> None:
        """Note that so many guesses of a computed piece were right and are tokens now; what others' keys and values took is free again."""
        sequence = piece.sequence
        sequence.computed += right
        needed = self._blocks_for(len(sequence.tokens))
        self.pool.release(sequence.block_table[needed:])
        del sequence.block_table[needed:]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take out a running sequence that has ended, and free its blocks."""
        sequence.finish_reason = reason
        self.running.remove(sequence)
        self._give_back(sequence)

    def _grow(self, sequence: Sequence, budget: int) -> Piece | None:
        """A piece of a running sequence with blocks for it, preempting younger ones as needed; None if it had to give way itself."""
        stop = min(len(sequence.tokens), sequence.computed + budget)
        while (more := self._blocks_for(stop) - len(sequence.block_table)) > 0:
            blocks = self.pool.allocate(more)
            if blocks is not None:
                sequence.block_table += blocks
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        return Piece(sequence, sequence.computed, stop)

    def _with_draft(self, piece: Piece, guess: Guess, budget: int) -> Piece:
        sequence = piece.sequence
        draft = guess(sequence, min(budget, sequence.limit - len(sequence.tokens) - 1), self._max_step_tokens - budget)
        more = self._blocks_for(piece.stop + len(draft)) - len(sequence.block_table)
        if more > 0:
            sequence.block_table += self.pool.allocate(more) or []
            draft = draft[: len(sequence.block_table) * self.block_size - piece.stop]
        return Piece(sequence, piece.start, piece.stop, tuple(draft))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table, sequence.computed = [], 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
