"""Chat messages -> the text that the model sees, through its own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from qforge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def check_messages(value: object, where: str) -> list[Message]:
    """`value` as a list of messages.

    Raises:
        DataError: it is no non-empty list of `{"role": text, "content": text}`; the message begins with `where` (file:line).
    """
    if not isinstance(value, list) or not value:
        raise DataError(f'{where}: "messages" must be a non-empty list of {{"role": ..., "content": ...}}')
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f'{where}: message {i + 1} must be an object with "role" and "content", both text')
    return value


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer can render chat messages."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    """The text of a conversation through the tokenizer's chat template.

    A BOS that the template writes in front is taken away where the tokenizer itself puts one before plain text, so that a window never begins with two.

    Raises:
        DataError: there is no template, or it refuses these messages (roles out of order, for instance).
    """
    if not has_chat_template(tokenizer):
        raise DataError(f'{where}: chat messages need a chat template, and this model\'s tokenizer has none; give records with "text" instead')
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError) as e:
        raise DataError(f"{where}: the model's chat template refuses these messages: {e}") from e
    return text.removeprefix(str(tokenizer.bos_token)) if begins_with_bos(tokenizer) else text


def render_plain(messages: Sequence[Message]) -> str:
    """A conversation as plain dialogue, for tokenizers without a chat template: the contents as paragraphs."""
    return "\n\n".join(str(message["content"]) for message in messages)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS before plain text (as Llama's and Gemma's do, GPT-2's and SmolLM2's do not)."""
    bos = tokenizer.bos_token_id
    return bos is not None and bool(list(tokenizer("a").input_ids)[:1] == [bos])
