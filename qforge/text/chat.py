"""Chat messages -> the text that the model sees, through its own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qforge.deadline import computing, within_memory
from qforge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_SECONDS, _BYTES = 4.0, 1 << 30  # of computing and of memory, for a conversation
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A document's text and, of a conversation, the characters `(start, stop)` that the assistant says, end marks included; None: all of the text, or nobody knows."""

    text: str
    answers: Spans | None = None


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


class TemplateRefusal(DataError):
    """A chat template does not take these messages (roles out of order, for instance)."""


def apply_template(messages: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool = False) -> str:
    """A conversation through a tokenizer's chat template, which is a stranger's program.

    Raises:
        TemplateRefusal: what Jinja or the template raises.
        DataError: it takes too much time or memory over these messages, in the main thread (`deadline`).
    """
    try:
        with computing(_SECONDS), within_memory(_BYTES):
            return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt))
    except TimeoutError as e:
        raise DataError(f"the model's chat template takes more than {_SECONDS} s over these messages") from e
    except MemoryError as e:
        raise DataError(f"the model's chat template takes more than {_BYTES:,} bytes of memory over these messages") from e
    except Exception as e:  # whatever a template's own code raises
        raise TemplateRefusal(f"the model's chat template refuses these messages: {' '.join(str(e).split())}") from e


def render_chat(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, where: str) -> Rendered:
    """A conversation through the tokenizer's chat template.

    A BOS that the template writes in front is taken away where the tokenizer itself puts one before plain text, so that a window never begins with two.

    Raises:
        DataError: there is no template, or see `apply_template`.
    """
    if not has_chat_template(tokenizer):
        raise DataError(f'{where}: chat messages need a chat template, and this model\'s tokenizer has none; give records with "text" instead')
    try:
        text = apply_template(messages, tokenizer)
    except DataError as e:
        raise DataError(f"{where}: {e}") from e
    answers, bos = _answers(messages, tokenizer, text), str(tokenizer.bos_token)
    if not begins_with_bos(tokenizer) or not text.startswith(bos):
        return Rendered(text, answers)
    return Rendered(text[len(bos) :], answers and tuple((start - len(bos), stop - len(bos)) for start, stop in answers))


def _answers(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, text: str) -> Spans | None:
    """Where the assistant speaks: from behind the prompt that a server would give it to the end of its turn. None where a template changes a turn when others follow."""
    spans = []
    for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
        try:
            before = apply_template(messages[:i], tokenizer, add_generation_prompt=True)
            after = apply_template(messages[: i + 1], tokenizer).rstrip()
        except TemplateRefusal:
            return None
        if not after.startswith(before) or not text.startswith(after):
            return None
        spans.append((len(before), len(after)))
    return tuple(spans)


def render_plain(messages: Sequence[Message]) -> str:
    """A conversation as plain dialogue, for tokenizers without a chat template: the contents as paragraphs."""
    return "\n\n".join(str(message["content"]) for message in messages)


def begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its BOS before plain text (as Llama's and Gemma's do, GPT-2's and SmolLM2's do not)."""
    bos = tokenizer.bos_token_id
    return bos is not None and bool(list(tokenizer("a").input_ids)[:1] == [bos])
