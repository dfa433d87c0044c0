"""Token ids of the worst positions -> text that a person can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qforge.types import Evaluation, WorstToken

CONTEXT = 24  # tokens before a bad position


def spelled(evaluation: Evaluation, windows: list[list[int]], decode: Callable[[list[int]], str]) -> Evaluation:
    """The same evaluation with texts: of each worst token, of what was expected instead, and of what stands before it."""

    def token(w: WorstToken) -> WorstToken:
        before = windows[w.window][max(0, w.position - CONTEXT) : w.position]
        expected, reference = ([replace(g, text=_after(before, g.token, decode)) for g in found] for found in (w.expected, w.expected_reference))
        return replace(w, text=_after(before, w.token, decode), context=decode(before), expected=expected, expected_reference=reference)

    return replace(evaluation, worst_tokens=list(map(token, evaluation.worst_tokens)))


def _after(before: list[int], token: int, decode: Callable[[list[int]], str]) -> str:
    """What a token adds to the text of the one before it: read alone, a SentencePiece token loses the blank that begins a word."""
    last, both = decode(before[-1:]), decode([*before[-1:], token])
    return both[len(last) :] if both.startswith(last) else decode([token])
