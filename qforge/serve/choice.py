"""One continuation on its way to a client: its pieces, and what an answer says of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qforge.runtime.sequence import Logprob
from qforge.runtime.tokenizer import Tokenizer
from qforge.serve.worker import Piece, Ticket

_LEAST = -9999.0  # of a log-probability, since JSON has no infinity; vLLM says so, too


@dataclass(slots=True, eq=False)
class Choice:
    """Attributes:
    index: its place in the answer.
    echo: the prompt's text if the answer is to begin with it; None once it has.
    """

    index: int
    ticket: Ticket
    tokenizer: Tokenizer
    echo: str | None
    _before: list[int] | None = None  # the last token that was told, since what a token adds to a text depends on it
    _offset: int = 0

    def text(self, piece: Piece) -> str:
        """A piece's text, behind the prompt's if that is wanted."""
        echo, self.echo = self.echo or "", None
        return echo + piece.text

    def completion(self, piece: Piece) -> dict[str, list[Any]] | None:
        """`logprobs` of a part of a completion."""
        if piece.logprobs is None:
            return None
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, told in self._tokens(piece):
            text = self._spelled(token)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if told is None else _finite(told.logprob))
            found["top_logprobs"].append(None if told is None else self._by_text(text, told))
            found["text_offset"].append(self._offset)
            self._before, self._offset = [token], self._offset + len(text)
        return found

    def chat(self, piece: Piece) -> dict[str, Any] | None:
        """`logprobs` of a part of a chat."""
        if piece.logprobs is None:
            return None
        content = []
        for token, told in self._tokens(piece):
            assert told is not None
            content.append(self._described(token, told.logprob) | {"top_logprobs": [self._described(t, p) for t, p in told.top]})
            self._before = [token]
        return {"content": content, "refusal": None}

    def _tokens(self, piece: Piece) -> Iterable[tuple[int, Logprob | None]]:
        sequence = self.ticket.sequence
        if self._before is None:
            self._before = [] if piece.prompt_logprobs is not None else sequence.tokens[sequence.num_prompt - 1 : sequence.num_prompt]
        prompt = zip(sequence.tokens, piece.prompt_logprobs or (), strict=False)
        return [*prompt, *((told.token, told) for told in piece.logprobs or ())]

    def _by_text(self, text: str, told: Logprob) -> dict[str, float]:
        """The most likely tokens and the one that is there; of several with the same text, the first."""
        best: dict[str, float] = {}
        for token, logprob in told.top:
            best.setdefault(self._spelled(token), _finite(logprob))
        best.setdefault(text, _finite(told.logprob))
        return best

    def _described(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spelled(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

    def _spelled(self, token: int) -> str:
        """What a token adds to the text behind the last one, by itself where that is not a whole character; the special ones by their names."""
        before = self._before or []
        known, both = self._decode(before), self._decode([*before, token])
        return both[len(known) :] if both.startswith(known) and not known.endswith("\ufffd") else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
