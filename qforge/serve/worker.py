"""The thread that steps the engine for everybody, and hands out text as it comes. Standard library and the runtime only."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qforge.errors import MissingCapabilityError, QforgeError, UnsupportedError
from qforge.runtime.sequence import FinishReason, Logprob, SamplingParams, Sequence

if TYPE_CHECKING:
    from qforge.runtime.engine import Engine

MOST_WAITING = 1024  # requests that wait for their turn
ENDING = "the server is ending"
_log = logging.getLogger(__name__)


class Overloaded(UnsupportedError):
    """Too many requests wait."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of a request since the piece before.

    Attributes:
        text: new text; what may begin a stop string is held back.
        finish_reason: `stop` or `length` with the last piece, else None.
        error: why it ended without one.
        logprobs: of its tokens, where they are wanted.
        prompt_logprobs: with the first piece, where they are.
    """

    text: str
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way.

    Attributes:
        deliver: called with each piece, where `Worker` has it called.
        tokens, characters: handed out so far.
        began, first: when it came and when its first token did, of `time.monotonic`.
        whole: whether it wants one piece, at its end.
    """

    sequence: Sequence
    deliver: Callable[[Piece], None]
    began: float
    whole: bool
    first: float | None = None
    tokens: int = 0
    characters: int = 0


class Worker:
    """Steps an engine, in a thread of its own, while it has requests.

    Args:
        call: what has all deliveries of a step called.
        ended: called with each request that has ended and why: `stop`, `length`, `error` or `cancelled`.
    """

    def __init__(self, engine: Engine, call: Callable[[Callable[[], None]], None], ended: Callable[[Ticket, str], None]) -> None:
        self._engine, self._call, self._ended = engine, call, ended
        self._ready: list[tuple[Callable[[Piece], None], Piece]] = []
        self._tickets: dict[int, Ticket] = {}
        self._changed = threading.Condition()
        self._over: str | None = None  # why nothing is computed any more
        self._thread = threading.Thread(target=self._run, name="qforge-serve", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is left, and end."""
        with self._changed:
            self._over = self._over or ENDING
            self._changed.notify_all()
        self._thread.join()

    def submit(self, requests: list[tuple[list[int], SamplingParams, Callable[[Piece], None]]], began: float, *, whole: bool) -> list[Ticket]:
        """Queue requests, (prompt, parameters, deliver) each: all of them or none. `deliver` gets a request's pieces, the last with a reason or an error.

        Args:
            began: when they came, of `time.monotonic`.
            whole: whether they want one piece each, at the end.

        Raises:
            Overloaded: too many wait, or nothing is computed any more.
            DataError: as `Engine.add`.
        """
        with self._changed:
            if not self.alive():
                raise Overloaded(self._over or ENDING)
            if len(self._engine.scheduler.waiting) + len(requests) > MOST_WAITING:
                raise Overloaded(f"{len(self._engine.scheduler.waiting):,} requests wait already, and at most {MOST_WAITING:,} may; ask again later")
            tickets: list[Ticket] = []
            try:
                for prompt, params, deliver in requests:
                    tickets.append(Ticket(self._engine.add(prompt, params), deliver, began, whole))
            except BaseException:
                for ticket in tickets:
                    self._engine.cancel(ticket.sequence)
                    self._engine.forget(ticket.sequence)
                raise
            self._tickets |= {ticket.sequence.id: ticket for ticket in tickets}
            self._changed.notify_all()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose client has left; nothing more is delivered. One that has ended stays as it ended."""
        with self._changed:
            if ticket.sequence.id in self._tickets:
                with contextlib.suppress(Exception):
                    self._engine.cancel(ticket.sequence)
                self._forget(ticket)
                self._ended(ticket, "cancelled")

    def alive(self) -> bool:
        """Whether it still steps."""
        return self._over is None and self._thread.is_alive()

    def counts(self) -> tuple[int, int]:
        """How many requests run and wait."""
        return len(self._engine.scheduler.running), len(self._engine.scheduler.waiting)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over is not None or self._engine.busy())
                if self._over is not None:
                    self._fail(self._over)
                    self._deliver()
                    return
            problem, gone = None, False
            try:
                self._engine.step()
            except Exception as e:
                problem, gone = _told(e), isinstance(e, MissingCapabilityError)  # of the runner, which has no way back
                _log.error("a step failed: %s", problem)
            with self._changed:
                self._over = problem if gone else self._over
                self._hand_out(problem)
                self._deliver()

    def _hand_out(self, problem: str | None) -> None:
        """What a step gave. A problem is that of the requests which the engine has dropped for it; where it has dropped none, that of all."""
        dropped = [t for t in self._tickets.values() if t.sequence.finish_reason is FinishReason.CANCELLED]
        if problem is not None and not dropped:
            self._fail(problem)
        for ticket in dropped:
            self._end(ticket, Piece("", error=problem or "the request was dropped"))
        for ticket in list(self._tickets.values()):
            tokens = len(ticket.sequence.tokens) - ticket.sequence.num_prompt
            if tokens and ticket.first is None:
                ticket.first = time.monotonic()
            if ticket.sequence.finish_reason is None and (ticket.whole or tokens == ticket.tokens):
                continue
            try:
                piece = self._piece(ticket, tokens)
            except Exception as e:  # whatever a tokenizer raises
                self._drop(ticket, _told(e))
                continue
            if piece.finish_reason is None:
                self._ready.append((ticket.deliver, piece))
            else:
                self._end(ticket, piece)

    def _piece(self, ticket: Ticket, tokens: int) -> Piece:
        sequence, text = ticket.sequence, self._engine.text(ticket.sequence)
        told = sequence.logprobs[ticket.tokens :] if sequence.params.logprobs is not None else None
        of_prompt = sequence.prompt_logprobs if sequence.params.prompt_logprobs is not None and ticket.tokens == 0 else None
        piece = Piece(text[ticket.characters :], str(sequence.finish_reason) if sequence.finish_reason else None, None, told, of_prompt)
        ticket.tokens, ticket.characters = tokens, len(text)
        return piece

    def _fail(self, problem: str) -> None:
        for ticket in list(self._tickets.values()):
            self._drop(ticket, problem)

    def _drop(self, ticket: Ticket, problem: str) -> None:
        with contextlib.suppress(Exception):  # of a tokenizer
            self._engine.cancel(ticket.sequence)
        self._end(ticket, Piece("", error=problem))

    def _end(self, ticket: Ticket, piece: Piece) -> None:
        self._forget(ticket)
        self._ended(ticket, piece.finish_reason or "error")
        self._ready.append((ticket.deliver, piece))

    def _deliver(self) -> None:
        """Once a step, and not once a request: whom it is for is woken once."""
        ready, self._ready = self._ready, []

        def deliveries() -> None:
            for deliver, piece in ready:
                deliver(piece)

        if ready:
            self._call(deliveries)

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.sequence.id]
        self._engine.forget(ticket.sequence)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, QforgeError) else f"{type(error).__name__}: {error}"
