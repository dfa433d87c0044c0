"""Tokens to text, piece by piece: characters of several tokens come out whole, and a stop string cuts the text."""

from __future__ import annotations

from qforge.runtime.tokenizer import Tokenizer

_CONTEXT = 8  # tokens before the new ones: how a tokenizer joins words depends on what stands before them
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of one sequence's generated tokens. Without stop strings tokens are only noted until somebody asks for the text: turning them into text takes 30 us a token."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = prompt[-_CONTEXT:]
        self._start, self._read = 0, len(self._tokens)
        self._text = ""

    @property
    def text(self) -> str:
        """What is certain so far."""
        if not self._stop:
            self._advance()
        return self._text

    def add(self, token: int) -> bool:
        """Take one more token; True if a stop string is complete (the text is then cut before it)."""
        self._tokens.append(token)
        return bool(self._stop) and self._advance()

    def finish(self) -> bool:
        """Give out bytes that never became a character; True if that completed a stop string."""
        known = self._decode(self._tokens[self._start : self._read])
        return self._extend(self._decode(self._tokens[self._start :])[len(known) :])

    def _advance(self) -> bool:
        if self._read == len(self._tokens):
            return False
        known = self._decode(self._tokens[self._start : self._read])
        both = self._decode(self._tokens[self._start :])
        if len(both) <= len(known) or both.endswith(_UNFINISHED):
            return False
        return self._extend(both[len(known) :])

    def _extend(self, new: str) -> bool:
        searched = max(0, len(self._text) - max((len(s) for s in self._stop), default=0))
        self._text += new
        self._start, self._read = max(self._start, self._read - _CONTEXT), len(self._tokens)
        found = [at for at in (self._text.find(s, searched) for s in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
