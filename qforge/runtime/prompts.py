"""Prompts: texts, token ids or chat messages -> token ids that a model has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from qforge.errors import DataError
from qforge.runtime.tokenizer import Tokenizer
from qforge.text.chat import apply_template

_LONGEST_TOKEN = 256  # characters, on average over a text

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model.

    Attributes:
        source: the model, as the user wrote it.
        tokenizer: makes its tokenizer, or gives the one that was made.
        max_context: positions that it has.
        vocab_size: tokens that it has.
    """

    source: str
    tokenizer: Callable[[], Tokenizer]
    max_context: int
    vocab_size: int

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt. A chat template writes its own special tokens, so none are added to its text.

        Raises:
            DataError: the prompt is empty or of no known kind, or the model has no chat template.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise DataError("it is empty; give at least one character (or a list with a token id)")
            return prompt, known(list(self.tokenizer().encode(self._short(_whole(prompt)))), self.vocab_size)
        items = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, bytes | Mapping) else [None]
        if not items:
            raise DataError("it is empty; give at least one token")
        if all(isinstance(i, Integral) and not isinstance(i, bool) for i in items):
            return None, known([int(i) for i in items if isinstance(i, Integral)], self.vocab_size)
        if all(isinstance(i, Mapping) and isinstance(i.get("role"), str) and isinstance(i.get("content"), str) for i in items):
            text = self._short(_whole(self._render(self._few(items))))
            return text, known(list(self.tokenizer().encode(text, add_special_tokens=False)), self.vocab_size)
        raise DataError("it is neither a text, nor a list of token ids, nor a list of messages with role and content")

    def _short(self, text: str) -> str:
        """The text; refused before it is split where no model could hold its tokens."""
        most = _LONGEST_TOKEN * self.max_context
        if len(text) > most:
            raise DataError(f"it has {len(text):,} characters; the model's context of {self.max_context:,} tokens holds fewer than {most:,}")
        return text

    def _few(self, messages: list[Any]) -> list[Any]:
        """The messages, each of which has at least a token; refused before a template, which nobody can end beside the main thread, goes over more than fit."""
        characters = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
        if len(messages) > self.max_context or characters > _LONGEST_TOKEN * self.max_context:
            raise DataError(f"it has {len(messages):,} messages of {characters:,} characters; the model's context of {self.max_context:,} tokens holds fewer")
        return messages

    def _render(self, messages: list[Any]) -> str:
        if not self.tokenizer().chat_template:
            raise DataError(f"'{self.source}' has no chat template; give a text instead of messages")
        try:
            return apply_template(messages, self.tokenizer(), add_generation_prompt=True)
        except DataError as e:
            raise DataError(f"'{self.source}': {e}") from e


def known(ids: list[int], vocab_size: int) -> list[int]:
    """Token ids; DataError where one is not in a vocabulary of so many."""
    wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise DataError(f"token {wrong} is not in the model's vocabulary of {vocab_size}")
    return ids


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError("it holds half a character (a lone surrogate); give valid Unicode") from e
    return text
