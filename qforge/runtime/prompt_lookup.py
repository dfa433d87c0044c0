"""Guess what comes next in a sequence: what followed its last four tokens where they stood last (prompt lookup decoding, Saxena 2023; vLLM's `ngram`). Standard library only.

A step computes guesses behind a sequence's last token, and those are kept that the model would have chosen. Where bits do not depend on what else a step computes, tokens are
the same as without.
"""

from __future__ import annotations

_WORDS = 4  # of three, half as many guesses again are wrong, and hardly more are right (docs/log.md)
_SURE, _WEIGHT = 0.9, 0.1  # a share of expected tokens that came, and how much each changes it


class PromptLookup:
    """Of one sequence, whose tokens only become more. What it expects is compared with what comes, also where it was not computed: only who was right just now is asked.

    Args:
        most: guesses of a step.
    """

    def __init__(self, most: int) -> None:
        self._most, self._length, self._share = most, 0, 0.0  # of the next guess
        self._after: dict[tuple[int, ...], int] = {}  # where it goes on behind each four of `tokens[:seen - 1]`, the last such place
        self._seen = _WORDS
        self._expected: list[int] = []
        self._since = 0  # tokens that there were then

    def guess(self, tokens: list[int], most: int, *, sure: bool) -> list[int]:
        """At most `most` tokens after `tokens`. `sure`: none unless most of what was expected lately came, for where a row costs as much as a token."""
        self._learn(tokens[self._since :])
        for end in range(self._seen, len(tokens)):
            self._after[tuple(tokens[end - _WORDS : end])] = end
        self._seen = max(self._seen, len(tokens))
        place = self._after.get(tuple(tokens[-_WORDS:]))
        self._expected, self._since = self._read(tokens, place) if place else [], len(tokens)
        return self._expected[: min(most, self._length)] if self._share >= _SURE or not sure else []

    def _learn(self, came: list[int]) -> None:
        """The next guess is twice as long as the last one if all came as expected, else as long as what did."""
        compared = min(len(came), len(self._expected))
        if compared:
            right = next((i for i in range(compared) if came[i] != self._expected[i]), compared)
            self._length = min(self._most, max(1, 2 * self._length) if right == compared else right)
            self._share = 1 - (1 - self._share) * (1 - _WEIGHT) ** right
            if right < compared:
                self._share *= 1 - _WEIGHT

    def _read(self, tokens: list[int], place: int) -> list[int]:
        """One more than can be guessed, from a place on; behind the end it repeats itself."""
        wanted = self._most + 1
        read = tokens[place : place + wanted]
        while len(read) < wanted:
            read += read[: wanted - len(read)]
        return read
