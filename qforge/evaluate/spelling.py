"""Token ids of the worst positions -> text that a person can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qforge.types import Evaluation, Guess, WorstToken

CONTEXT = 24  # tokens before a bad position


def spelled(evaluation: Evaluation, windows: list[list[int]], decode: Callable[[list[int]], str]) -> Evaluation:
    """The same evaluation with texts: of each worst token, of what was expected instead, and of what stands before it."""

    def guess(g: Guess) -> Guess:
        return replace(g, text=decode([g.token]))

    def token(w: WorstToken) -> WorstToken:
        before = windows[w.window][max(0, w.position - CONTEXT) : w.position]
        expected, reference = (list(map(guess, found)) for found in (w.expected, w.expected_reference))
        return replace(w, text=decode([w.token]), context=decode(before), expected=expected, expected_reference=reference)

    return replace(evaluation, worst_tokens=list(map(token, evaluation.worst_tokens)))
