"""Tokens to text, piece by piece: characters of several tokens come out whole, and a stop string cuts the text."""

from __future__ import annotations

from qforge.runtime.tokenizer import Tokenizer

_CONTEXT = 8  # tokens before the new ones: how a tokenizer joins words depends on what stands before them
_LONGEST = 4  # tokens of one character, which are bytes of UTF-8 then
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of one sequence's generated tokens. Without stop strings tokens are only noted until somebody asks for the text: turning them into text takes 30 us a token.

    Decoding always begins where a character does: a tokenizer with byte fallback makes nothing but U+FFFD of a whole run of bytes that begins in the middle of one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = self._end_of(prompt)
        self._whole = [0, len(self._tokens)]  # where characters begin: the first is where decoding begins, the last how far text is out
        self._text = ""
        self._ended = False

    @property
    def text(self) -> str:
        """What is certain so far: what may be the beginning of a stop string comes out once it is known not to be, or at the end."""
        if not self._stop:
            self._advance()
        return self._text if self._ended else self._text[: len(self._text) - self._held()]

    def add(self, token: int) -> bool:
        """Take one more token; True if a stop string is complete (the text is then cut before it)."""
        self._tokens.append(token)
        return bool(self._stop) and self._advance()

    def finish(self) -> bool:
        """Give out what was held back, and bytes that never became a character; True if that completed a stop string."""
        self._ended = True
        return self._extend(self._new())

    def _advance(self) -> bool:
        new = "" if self._whole[-1] == len(self._tokens) else self._new()
        return bool(new) and not new.endswith(_UNFINISHED) and self._extend(new)

    def _new(self) -> str:
        """Text of the tokens whose text is not out yet."""
        start, read = self._whole[0], self._whole[-1]
        known, both = self._decode(self._tokens[start:read]), self._decode(self._tokens[start:])
        return both[len(known) :] if both.startswith(known) else self._decode(self._tokens[read:])  # bytes that are no characters undo those before them

    def _extend(self, new: str) -> bool:
        searched = max(0, len(self._text) - max((len(s) for s in self._stop), default=0))
        self._text += new
        self._whole.append(len(self._tokens))
        while len(self._whole) > 2 and self._whole[1] <= self._whole[-2] - _CONTEXT:
            del self._whole[0]
        found = [at for at in (self._text.find(s, searched) for s in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _held(self) -> int:
        """Characters at the end of the text that a stop string begins with."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        return next((n for n in range(min(longest, len(self._text)), 0, -1) if any(s.startswith(self._text[-n:]) for s in self._stop)), 0)

    def _end_of(self, prompt: list[int]) -> list[int]:
        """The end of a prompt, from where a character begins."""
        ends = [prompt[-n:] for n in range(_CONTEXT, min(_CONTEXT + _LONGEST, len(prompt) + 1))] or [list(prompt)]
        return list(next((end for end in ends if not self._decode(end).startswith(_UNFINISHED)), ends[0]))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
