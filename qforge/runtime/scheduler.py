"""Which tokens of which sequences the next step computes: continuous batching over a pool of cache blocks. Standard library only.

At every step finished sequences leave and waiting ones enter, first come first served, but for those that wait for what another is computing. Long prompts are computed in pieces,
so that others go on meanwhile, and those that do not fit one step leave some of it to who came later.
When the pool runs out, the youngest running sequence gives its blocks back and is computed again later; its tokens stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from qforge.errors import DataError
from qforge.runtime import prefixes
from qforge.runtime.blocks import BlockPool
from qforge.runtime.sequence import FinishReason, Sequence

_LEFT = 4  # prompts longer than a step leave the fourth part of it to shorter ones
_MOST_PASSED = 256  # waiting sequences that are looked up at a step, and wait on
_LOGITS = 128  # prompt tokens of a step whose logits are wanted: each has the size of the vocabulary


class Piece(NamedTuple):
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
    def tells_prompt(self) -> bool:
        """Whether logits of its prompt's tokens are wanted."""
        return self.sequence.params.prompt_logprobs is not None and self.start < self.sequence.num_prompt

    @property
    def wanted(self) -> int:
        """The position from which on logits are wanted, up to `end`; `end` where none are."""
        return self.start if self.tells_prompt else self.stop - 1 if self.wants_logits else self.end

    @property
    def end(self) -> int:
        """Where the guesses end, too."""
        return self.stop + len(self.draft)


Guess = Callable[[Sequence, int, int], list[int]]  # tokens that a sequence may go on with, at most so many, in a step that has so many already


class _Step:
    """A step that is filled: its pieces, how many more tokens it takes, how many of them may be of long prompts, and of how many prompt tokens logits may be wanted."""

    def __init__(self, tokens: int) -> None:
        self.pieces: list[Piece] = []
        self.most, self.left, self.left_for_long, self.left_for_logits = tokens, tokens, max(1, tokens - tokens // _LEFT), _LOGITS

    def take(self, sequence: Sequence) -> int:
        """How many tokens a sequence may compute in it; they are taken."""
        rest = len(sequence.tokens) - sequence.computed
        tokens = min(rest, self.left)
        if rest > self.most:
            tokens = min(tokens, self.left_for_long)
            self.left_for_long -= tokens
        if sequence.params.prompt_logprobs is not None and sequence.computed < sequence.num_prompt:
            tokens = min(tokens, self.left_for_logits)
            self.left_for_logits -= tokens
        self.left -= tokens
        return tokens


class Scheduler:
    """Holds the waiting and the running sequences.

    Args:
        prefix_cache: whether a sequence begins behind what the pool has of its tokens.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_seqs: int, max_step_tokens: int, *, prefix_cache: bool = False) -> None:
        self.pool, self.block_size = pool, block_size
        self._max_num_seqs, self._max_step_tokens, self._prefix_cache = max_num_seqs, max_step_tokens, prefix_cache
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
        step = _Step(self._max_step_tokens)
        for sequence in list(self.running):
            if sequence.block_table or sequence in self.running:  # an older one may have preempted it just now, and it holds nothing then
                self._join(step, sequence)
        passed = 0
        while step.left and passed < min(len(self.waiting), _MOST_PASSED) and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[passed]
            found = self._found(sequence)
            if found is None:
                passed += 1
            elif self._enter(sequence, found):
                del self.waiting[passed]
                self.running.append(sequence)
                self._join(step, sequence)
            else:
                break
        self._fill(step)
        pieces, left = step.pieces, step.left
        if guess is not None:
            for i, piece in enumerate(pieces):
                if left and piece.wants_logits:
                    pieces[i] = self._with_draft(piece, guess, left)
                    left -= len(pieces[i].draft)
        return pieces

    def advance(self, pieces: list[Piece]) -> None:
        """Note that a step's pieces are computed."""
        for piece in pieces:
            piece.sequence.computed = piece.stop
            if self._prefix_cache:
                prefixes.note(piece.sequence, self.pool, self.block_size)

    def keep(self, piece: Piece, right: int) -> None:
        """Note that so many guesses of a computed piece were right and are tokens now; what others' keys and values took is free again."""
        sequence = piece.sequence
        sequence.computed += right
        needed = self._blocks_for(len(sequence.tokens))
        if len(sequence.block_table) > needed:
            self.pool.release(sequence.block_table[needed:])
            del sequence.block_table[needed:]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take out a running sequence that has ended, and free its blocks."""
        sequence.finish_reason = reason
        self.running.remove(sequence)
        self._give_back(sequence)

    def _found(self, sequence: Sequence) -> list[int] | None:
        """What the cache has of a waiting sequence; None while another is computing what comes next: it then waits for that, holds nothing, and lets others pass."""
        if not self._prefix_cache or sequence.params.prompt_logprobs is not None:
            return []
        found = prefixes.find(sequence, self.pool, self.block_size)
        return None if prefixes.coming(sequence, len(found), self.running) else found

    def _enter(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether there is room for a waiting sequence, beside what those that run are to have for the tokens that they have; it then holds what was found of it."""
        free = self.pool.num_free - sum(not self.pool.owners(b) for b in found)
        promised = sum(max(0, self._blocks_for(len(s.tokens)) - len(s.block_table)) for s in self.running)
        if self._blocks_for(len(sequence.tokens)) - len(found) > free - promised:
            return False
        for b in found:
            self.pool.share(b)
        sequence.block_table, sequence.computed, sequence.named_blocks = found, len(found) * self.block_size, len(found)
        if not sequence.preemptions:
            sequence.cached = sequence.computed
        return True

    def _join(self, step: _Step, sequence: Sequence) -> None:
        """Put a running sequence's next tokens into a step, as many as it has room for."""
        tokens = step.take(sequence)
        stop = sequence.computed + tokens
        if tokens and self._hold(sequence, stop):
            step.pieces.append(Piece(sequence, sequence.computed, stop))
        else:
            step.left += tokens

    def _fill(self, step: _Step) -> None:
        """Give what nobody came for to those that left it."""
        for i, piece in enumerate(step.pieces):
            stop = min(piece.stop + step.left, len(piece.sequence.tokens))
            if stop > piece.stop and not piece.tells_prompt and self._blocks_for(stop) - len(piece.sequence.block_table) <= self.pool.num_free and self._hold(piece.sequence, stop):
                step.pieces[i] = Piece(piece.sequence, piece.start, stop)
                step.left -= stop - piece.stop

    def _hold(self, sequence: Sequence, stop: int) -> bool:
        """Have a running sequence hold blocks up to a position, preempting younger ones as needed; False if it had to give way itself."""
        while (more := self._blocks_for(stop) - len(sequence.block_table)) > 0:
            blocks = self.pool.allocate(more)
            if blocks is not None:
                sequence.block_table += blocks
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _with_draft(self, piece: Piece, guess: Guess, budget: int) -> Piece:
        sequence = piece.sequence
        draft = guess(sequence, min(budget, sequence.limit - len(sequence.tokens) - 1), self._max_step_tokens - budget)
        if not draft:
            return piece
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
