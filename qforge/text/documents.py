"""What the user names (built-in text, a file, a hub dataset) -> documents: rendered texts with a name and a hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qforge.errors import DataError
from qforge.files import expanded
from qforge.text.builtin import Role, builtin_files
from qforge.text.chat import Rendered, Spans, has_chat_template, render_plain
from qforge.text.hub import hub_texts, is_hub_id
from qforge.text.records import ChatRenderer, chat_renderer, jsonl_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS = (".jsonl", ".ndjson")
NO_TEXT = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".xz", ".zip", ".tar", ".pdf", ".docx", ".gguf", ".safetensors", ".bin", ".pt")
ALLOWED = "allowed are builtin, a text file (.txt: one document), a .jsonl file (one document a line) or a hub dataset (owner/name:config:split)"


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts as the model is to see them, in order.

    Attributes:
        source: as the user wrote it.
        texts: one rendered text a document, none of them blank.
        sha256: hex SHA-256 of the content as it is stored (a file's bytes; several files one after the other; a dataset's texts, each followed by a zero byte).
        answers: of each text, the characters that the assistant says, which are what is scored; None for a text that is scored whole. Empty: all are.
    """

    source: str
    texts: tuple[str, ...]
    sha256: str
    answers: tuple[Spans | None, ...] = ()


def documents(source: str, *, role: Role, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Read the text that a recipe or a flag names.

    Args:
        source: `builtin`; a `.jsonl` file (one document a line: `text`, `messages`, `prompt` with `completion`, or a string); any other text file (one document);
            `owner/name[:config[:split]]` of a hub dataset.
        role: which built-in text, and which split of a hub dataset. For evaluation conversations tell where their answers are (built-in ones do not).
        folder: what a relative path is relative to (the recipe's own folder).
        tokenizer: its chat template renders messages. The built-in conversations become plain paragraphs where it has none.

    Raises:
        DataError: no such file, empty, not UTF-8, malformed record (file:line), messages without a chat template.
        MissingCapabilityError: a hub dataset that this machine cannot read.
    """
    render = chat_renderer(tokenizer)
    if source == "builtin":
        plain: ChatRenderer = lambda messages, where: Rendered(render_plain(messages))  # noqa: E731
        return replace(_from_files(source, builtin_files(role), render if has_chat_template(tokenizer) else plain), answers=())
    check_named(source, folder)
    path = folder / expanded(source)
    if os.path.isfile(path):
        return _asked(_from_files(source, (path,), render), role)
    found = hub_texts(source, role, render)
    return _asked(replace(from_texts(source, [r.text for r in found]), answers=tuple(r.answers for r in found)), role)


def check_named(source: str, folder: Path) -> None:
    """Refuse what names no text, without reading one; the arguments are those of `documents`.

    Raises:
        DataError: no such file, a folder, a pipe or a device, or a file of a kind that is not read as text.
    """
    path = folder / expanded(source)
    if source == "builtin":
        return
    if os.path.isfile(path):
        _check_kind(path, source)
    elif os.path.isdir(path):
        raise DataError(f"{source}: this is a folder; {ALLOWED}")
    elif os.path.exists(path):
        raise DataError(f"{source}: this is a pipe, a socket or a device, and no file; write the text to a file and name that; {ALLOWED}")
    elif not _names_a_dataset(source, folder):
        raise DataError(f"{source}: no such file in {folder.resolve()}; {ALLOWED}")


def _asked(found: Documents, role: Role) -> Documents:
    """With answers only where they matter: for evaluation, and where there are any."""
    return found if role == "evaluation" and any(a is not None for a in found.answers) else replace(found, answers=())


def from_texts(source: str, texts: Sequence[str]) -> Documents:
    """Documents from texts at hand (a hub dataset, or what a model wrote).

    Raises:
        DataError: all of them are blank.
    """
    kept = tuple(text for text in texts if text.strip())
    if not kept:
        raise DataError(f"{source}: holds no text")
    digest = hashlib.sha256()
    for text in kept:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return Documents(source, kept, digest.hexdigest())


def _names_a_dataset(source: str, folder: Path) -> bool:
    path = Path(source)
    looks_local = path.suffix.lower() in (".txt", *RECORDS, *NO_TEXT) or os.path.isdir(folder / path.parent)
    return is_hub_id(source) and not looks_local


def _from_files(source: str, paths: Sequence[Path], render: ChatRenderer) -> Documents:
    digest = hashlib.sha256()
    texts: list[Rendered] = []
    for path in paths:
        name = source if len(paths) == 1 and source != "builtin" else path.name
        content = _bytes(path, name)
        digest.update(content)
        texts += _texts(path, name, _decode(content, name), render)
    if not texts:
        raise DataError(f"{source}: the text is empty; {ALLOWED}")
    return Documents(source, tuple(r.text for r in texts), digest.hexdigest(), tuple(r.answers for r in texts))


def _texts(path: Path, name: str, content: str, render: ChatRenderer) -> list[Rendered]:
    if path.suffix.lower() in RECORDS:
        return jsonl_texts(content, name, render)
    return [Rendered(content)] if content.strip() else []


def _check_kind(path: Path, name: str) -> None:
    if path.suffix.lower() in NO_TEXT:
        raise DataError(f"{name}: {path.suffix} is not read as text; {ALLOWED}")


def _bytes(path: Path, name: str) -> bytes:
    _check_kind(path, name)
    try:
        return path.read_bytes()
    except OSError as e:
        raise DataError(f"{name}: cannot be read: {e.strerror}") from e


def _decode(content: bytes, name: str) -> str:
    """UTF-8 with the line endings of a text file: CR LF and CR become LF; a byte order mark is left out."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise DataError(f"{name}: not UTF-8 text (byte {e.start}); save it as UTF-8") from e
    if "\0" in text:
        raise DataError(f"{name}: not text (it holds zero bytes); save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
