"""Text to tokens and back, without transformers: what the runtime asks of a tokenizer, and one that a cached model keeps."""

from __future__ import annotations

from typing import Any, Protocol

from qforge.models import chat_template


class Tokenizer(Protocol):
    """What transformers' tokenizers and `PlainTokenizer` share."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Text of tokens."""

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The text of a conversation."""


class PlainTokenizer:
    """The part of transformers' fast tokenizers that the runtime uses.

    Args:
        serialized: what `tokenizers` makes of a tokenizer (JSON, UTF-8).
        chat_template: Jinja, or None.
        special_tokens: names that templates may use (`bos_token`, ...).
    """

    def __init__(self, serialized: bytes, chat_template: str | None, special_tokens: dict[str, str]) -> None:
        from tokenizers import Tokenizer as Fast

        self.serialized, self.chat_template, self.special_tokens = serialized, chat_template, special_tokens
        self._fast = Fast.from_buffer(serialized)
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        """See `Tokenizer.decode`."""
        assert not clean_up_tokenization_spaces
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False) -> str:
        """The text; raises what Jinja or the template raises."""
        assert not tokenize
        assert self.chat_template is not None
        return chat_template.render(self.chat_template, conversation, self.special_tokens, add_generation_prompt=add_generation_prompt)


def plain(tokenizer: Any) -> PlainTokenizer | None:
    """transformers' tokenizer as a plain one; None where that would not do the same (a slow one, several templates, or samples come out otherwise)."""
    from qforge.models.trial import CHATS, SAMPLES

    fast, template = getattr(tokenizer, "backend_tokenizer", None), tokenizer.chat_template
    if fast is None or not (template is None or isinstance(template, str)):
        return None
    try:
        found = PlainTokenizer(fast.to_str().encode(), template or None, {name: str(value) for name, value in tokenizer.special_tokens_map.items()})
    except ValueError:  # what tokenizers itself wrote and does not read back
        return None
    same = all(_outcome(found, s) == _outcome(tokenizer, s) for s in SAMPLES) and (not template or all(_chat(found, c) == _chat(tokenizer, c) for c in CHATS))
    return found if same else None


def _outcome(tokenizer: Tokenizer, text: str) -> tuple[Any, ...]:
    ids = [tokenizer.encode(text, add_special_tokens=special) for special in (True, False)]
    return *ids, *(tokenizer.decode(ids[0], skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (True, False))


def _chat(tokenizer: Tokenizer, conversation: list[dict[str, str]]) -> str | None:
    """None where the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception:  # whatever a template's own code raises
        return None
