"""Guess what comes next in a sequence: what followed its last three tokens where they stood last (prompt lookup decoding, Saxena 2023; vLLM's `ngram`). Standard library only.

A step computes guesses behind a sequence's last token, and those are kept that the model would have chosen. Where bits do not depend on what else a step computes, tokens are
the same as without.
"""

from __future__ import annotations

_WORDS = 3  # of two, half as many guesses again are wrong in ordinary text; of four, a third fewer are right


class PromptLookup:
    """Of one sequence, whose tokens only become more.

    Args:
        most: guesses of a step.
    """

    def __init__(self, most: int) -> None:
        self._most, self._length, self._seen = most, 1, _WORDS
        self._after: dict[tuple[int, ...], int] = {}  # where it goes on behind each three of `tokens[:seen - 1]`, the last such place

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """At most `most` tokens after `tokens`; none where their last three are new."""
        for end in range(self._seen, len(tokens)):
            self._after[tuple(tokens[end - _WORDS : end])] = end
        self._seen = max(self._seen, len(tokens))
        place = self._after.get(tuple(tokens[-_WORDS:]))
        if place is None:
            return []
        behind = tokens[place : place + self._length]
        while len(behind) < self._length:  # it repeats itself
            behind += behind[: self._length - len(behind)]
        return behind[:most]

    def learn(self, guessed: int, right: int) -> None:
        """Of so many guesses so many were right: twice as many next time, or as many as that."""
        self._length = min(self._most, 2 * self._length) if right == guessed else max(1, right)
