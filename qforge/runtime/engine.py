"""The step loop: schedule, run, sample, finish. One request's fate never depends on another's."""

from __future__ import annotations

import secrets
from itertools import islice
from typing import TYPE_CHECKING

from qforge.errors import DataError, ModelError, NotOnRuntimeError
from qforge.runtime.cache_turn import CacheTurn
from qforge.runtime.detokenize import Detokenizer
from qforge.runtime.fair_lock import FairLock
from qforge.runtime.prompt_lookup import PromptLookup
from qforge.runtime.prompts import known
from qforge.runtime.scheduler import Piece, Scheduler
from qforge.runtime.sequence import Draw, FinishReason, SamplingParams, Sequence
from qforge.runtime.step import Runner, build_step
from qforge.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qforge.runtime.logprobs import Logprobs

_MANY_ROWS = 16  # from so many on a step waits for products, not for memory: a guess costs a token's time, and where tokens are drawn a draw's besides


class Engine:
    """Requests in, finished sequences out. Threads may share one: a call waits for another's step.

    Args:
        end_ids: tokens that end every continuation (unless it ignores them).
        max_context: positions that the model has.
        turn: of the runner's cache, which this engine has while it has requests.
        num_speculative_tokens: most tokens that a step computes on a guess after a sequence's last one; the runner has to be `batch_invariant`.
        prefix_cache: begin requests behind what the cache has of their tokens; where the runner is not `batch_invariant`, that can move last bits.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        turn: CacheTurn,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
        max_context: int,
        end_ids: frozenset[int],
        num_speculative_tokens: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        self._runner, self._tokenizer, self._block_size = runner, tokenizer, block_size
        self._max_context, self._end_ids = max_context, end_ids
        self.scheduler = Scheduler(turn.pool, block_size, max_num_seqs, max_step_tokens, prefix_cache=prefix_cache)
        self._texts: dict[int, Detokenizer] = {}
        self._most_guesses, self._lookups = num_speculative_tokens, dict[int, PromptLookup]()
        self._next_id = 0
        self._turn = turn
        self._lock = FairLock()

    def add(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """Queue a request.

        Raises:
            DataError: the prompt is empty, has tokens that the model does not know, leaves no room in its context, or could never fit the cache.
            NotOnRuntimeError: it leaves no room, and transformers has more.
            UnsupportedError: another user of the cache has requests.
        """
        known(prompt, self._runner.spec.vocab_size)
        if not prompt:
            raise DataError("a prompt has no tokens; give at least one")
        if len(prompt) >= self._max_context:
            beyond = self._runner.spec.beyond
            short = f"a prompt of {len(prompt)} tokens leaves no room in the model's context of {self._max_context}; shorten it to {self._max_context - 1} tokens or fewer"
            raise (NotOnRuntimeError if beyond else DataError)(short + beyond)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        text = Detokenizer(self._tokenizer, prompt, params.stop)
        with self._lock:
            sequence = Sequence(self._next_id, list(prompt), len(prompt), params, seed, self._limit(len(prompt), params.max_tokens), ends)
            self._turn.take(self)
            try:
                self.scheduler.add(sequence)
            finally:
                self._end_turn()
            self._next_id += 1
            self._texts[sequence.id] = text
        return sequence

    def step(self) -> list[tuple[Sequence, int]]:
        """One step; returns each sequence that got a token, and the token (one that got several comes several times). Empty when nothing is left to do.

        Raises:
            ModelError: a request's logits are not finite. It is then cancelled, and the others have their tokens; so it is with whatever the tokenizer raises.
        """
        with self._lock:
            pieces = self.scheduler.schedule(self._guess if self._most_guesses else None)
            if not pieces:
                return []
            chosen = self._choose(pieces)
            self.scheduler.advance(pieces)
            accepted: list[tuple[Sequence, int]] = []
            failed: Exception | None = None
            for piece, found, told in chosen:
                try:
                    accepted += [(piece.sequence, token) for token in self._accept(piece, found, told)]
                except Exception as e:
                    failed = failed or e
                    self._drop(piece.sequence)
            self._end_turn()
        if failed is not None:
            raise failed
        return accepted

    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request that waits or runs; one that has ended stays as it ended."""
        with self._lock:
            if sequence.finish_reason is not None:
                return
            self._drop(sequence)
            self._end_turn()
            self._texts[sequence.id].finish()  # last: whatever a tokenizer raises, the request has ended

    def text(self, sequence: Sequence) -> str:
        """Text of the continuation so far (complete once the sequence is finished)."""
        with self._lock:
            return self._texts[sequence.id].text

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the text of a request that has ended, cancelled ones included: whoever keeps an engine calls it for each."""
        self._texts.pop(sequence.id, None)

    def _limit(self, prompt: int, most: int | None) -> int:
        room = self.scheduler.pool.total * self._block_size if most is None else prompt + most
        return min(max(room, prompt + 1), self._max_context)

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.cancel(sequence)
        self._lookups.pop(sequence.id, None)

    def _end_turn(self) -> None:
        if not self.busy():
            self._turn.give_back(self)

    def _guess(self, sequence: Sequence, most: int, rows: int) -> list[int]:
        lookup = self._lookups.get(sequence.id)
        if lookup is None:
            lookup = self._lookups[sequence.id] = PromptLookup(self._most_guesses)
        many = rows >= _MANY_ROWS
        return lookup.guess(sequence.tokens, 0 if many and sequence.params.temperature else most, sure=many)

    def _choose(self, pieces: list[Piece]) -> list[tuple[Piece, list[int], Logprobs | None]]:
        """Pieces whose sequences get tokens, with those after the last one and after each guess; log-probabilities where they are wanted."""
        ready = [p for p in pieces if p.wants_logits]
        draws = [Draw(p.sequence.params, p.sequence.seed, position) for p in ready for position in range(p.stop, p.end + 1)]
        step = build_step(pieces, self._block_size)
        if any(p.tells_prompt or (p.wants_logits and p.sequence.params.logprobs is not None) for p in pieces):
            from qforge.runtime import logprobs

            return logprobs.choose(self._runner, step, pieces, draws)
        found = iter(self._runner.choose(step, draws))
        return [(p, list(islice(found, 1 + len(p.draft))), None) for p in ready]

    def _accept(self, piece: Piece, found: list[int], told: Logprobs | None) -> list[int]:
        """Of the tokens found after a sequence's last one and after each guess, those up to the first that differs from the next guess."""
        sequence, draft = piece.sequence, piece.draft
        if sequence.finish_reason is not None:
            return []  # cancelled by a signal's handler, while it was computed
        right = next((i for i, token in enumerate(draft) if token != found[i]), len(draft)) if draft else 0
        if min(found[: right + 1]) < 0:
            raise ModelError(
                "the model's logits are not finite: its weights are damaged (`qforge inspect --check` tells), or its activations overflow; another kind of activations may not"
            )
        for count, token in enumerate(found[: right + 1], 1):
            sequence.tokens.append(token)
            if told is not None:
                sequence.logprobs.append(told(count - 1, token))
            self._finish_if_done(sequence, token)
            if sequence.finish_reason is not None:
                self._lookups.pop(sequence.id, None)
                return found[:count]
        self.scheduler.keep(piece, right)
        return found[: right + 1]

    def _finish_if_done(self, sequence: Sequence, token: int) -> None:
        text = self._texts[sequence.id]
        reason = None
        if token in sequence.end_ids or text.add(token):
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            if text.finish():
                reason = FinishReason.STOP
            self.scheduler.finish(sequence, reason)
