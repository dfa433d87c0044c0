"""One record of a .jsonl file or of a hub dataset -> the text of one document."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from qforge.errors import DataError
from qforge.text.chat import Message, Rendered, check_messages, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELDS = '"text", "messages", "prompt" with "completion", or a plain string'
ChatRenderer = Callable[[list[Message], str], Rendered]


def chat_renderer(tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
    """Renders messages through the tokenizer's chat template."""
    return lambda messages, where: render_chat(messages, tokenizer, where)


def record_text(record: object, render: ChatRenderer, where: str) -> Rendered:
    """One record: a string, `text`, `messages`, or `prompt` and `completion` (two texts are joined as they are, and the second is the answer; two lists are one conversation).

    Raises:
        DataError: no usable field, or no valid Unicode; the message begins with `where` (file:line) and names the allowed fields.
    """
    found = _rendered(record, render, where)
    try:
        found.text.encode()
    except UnicodeEncodeError as e:
        raise DataError(f"{where}: half a character (a lone surrogate) in the text; write valid Unicode") from e
    return found


def _rendered(record: object, render: ChatRenderer, where: str) -> Rendered:
    if isinstance(record, str):
        return Rendered(record)
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a record is an object or a string, not {type(record).__name__}; allowed are {FIELDS}")
    if "messages" in record:
        return render(check_messages(record["messages"], where), where)
    if "text" in record:
        return Rendered(_string(record["text"], "text", where))
    if "prompt" in record and "completion" in record:
        return _completion(record["prompt"], record["completion"], render, where)
    raise DataError(f"{where}: no usable field among {', '.join(map(str, record)) or 'none'}; allowed are {FIELDS}")


def _completion(prompt: object, completion: object, render: ChatRenderer, where: str) -> Rendered:
    if isinstance(prompt, list) and isinstance(completion, list):
        return render(check_messages(prompt + completion, where), where)
    asked, told = _string(prompt, "prompt", where), _string(completion, "completion", where)
    return Rendered(asked + told, ((len(asked), len(asked) + len(told)),))


def _string(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f'{where}: "{name}" must be text, not {type(value).__name__}')
    return value


def jsonl_texts(content: str, name: str, render: ChatRenderer) -> list[Rendered]:
    """The texts of JSON Lines, one a line; blank lines and empty texts are left out.

    Raises:
        DataError: a line that is no JSON, or has no usable field (`name:line`).
    """
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{name}:{number}"
            texts.append(record_text(_parse(line, where), render, where))
    return [rendered for rendered in texts if rendered.text.strip()]


def _parse(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else getattr(e, "msg", e)
        raise DataError(f"{where}: not a JSON record ({reason}); a .jsonl file holds one JSON object or string a line") from e
