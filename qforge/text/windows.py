"""Documents -> the windows of token ids on which perplexity is measured: the one protocol behind all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qforge.errors import DataError
from qforge.text.chat import Spans, begins_with_bos
from qforge.text.documents import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """Token windows to be scored.

    Attributes:
        ids: token ids, one list a window.
        documents: for each window, the index of its document.
        tokens: number of scored positions.
        sha256: of the text, as `Documents.sha256`.
        protocol: the protocol in words and numbers; equal dictionaries mean comparable figures.
        bytes: UTF-8 bytes of text that the scored tokens of each window stand for; None where the tokenizer does not tell.
        notes: what a user should know (the window was capped, much was dropped).
        scored: of each window, the places (from 1) of the tokens that are scored: the assistant's, in conversations; None: all but the first of each window.
    """

    ids: list[list[int]]
    documents: list[int]
    tokens: int
    sha256: str
    protocol: dict[str, Any]
    bytes: list[int] | None
    notes: tuple[str, ...] = ()
    scored: list[list[int]] | None = None


def token_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of each text as one string, without special tokens added (those that the text itself spells are kept)."""
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def read_otherwise(documents: Documents, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """A note on documents that another tokenizer cuts otherwise; a few of them say that both read some strings in ways of their own.

    Raises:
        DataError: more than half: to the other one's model the ids of the first mean other text.
    """
    apart = sum(a != b for a, b in zip(token_ids(documents.texts, tokenizer), token_ids(documents.texts, other), strict=True))
    said = f"{documents.source}: {apart} of {len(documents.texts)} documents are other token ids for the model that is compared with"
    if 2 * apart > len(documents.texts):
        raise DataError(f"{said}: their tokenizers differ; compare models that share a tokenizer")
    return (f"{said}, which is scored on this one's",) if apart else ()


def _offsets(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int64]] | None:
    """The characters `[tokens, 2]` (start, stop) that each token of each text stands for; None where the tokenizer does not tell."""
    if not tokenizer.is_fast:
        return None
    found = (tokenizer(t, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False)["offset_mapping"] for t in texts)
    return [np.asarray(pairs, np.int64).reshape(-1, 2) for pairs in found]


def _byte_sizes(text: str, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """UTF-8 bytes that each token adds to the text before it; a character that several tokens share counts for the first of them."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    position = np.concatenate([[0], np.cumsum(sizes)])
    return np.diff(np.maximum.accumulate(position[offsets[:, 1]]), prepend=0)


def evaluation_windows(documents: Documents, tokenizer: PreTrainedTokenizerBase, window: int, *, context: int | None = None) -> EvaluationWindows:
    """Cut each document from its start into non-overlapping windows of `window` tokens and drop the rest.

    Where the tokenizer puts a BOS before plain text every window begins with it and holds `window - 1` tokens of text. When no document fills one window, each document
    is one window as it is, and the protocol says so. Of documents that tell where the assistant answers, the rest is kept and only answers are scored.

    Args:
        documents: the text.
        tokenizer: the model's.
        window: tokens a window, BOS included; at least 2.
        context: the model's context in tokens: a larger window is capped, and that is said.

    Raises:
        DataError: window below 2, no document has 2 tokens (BOS included), or nobody answers in any.
    """
    size = _capped(window, context)
    bos = [int(tokenizer.bos_token_id)] if begins_with_bos(tokenizer) else []
    streams = token_ids(documents.texts, tokenizer)
    longest = max(map(len, streams)) + len(bos)
    if longest < 2:
        raise DataError(f"{documents.source}: too short to be scored: {longest} token in its longest document, at least 2 are needed")
    offsets = _offsets(documents.texts, tokenizer)
    answers = documents.answers if offsets is not None else ()
    how = "conversations" if answers else "documents" if longest < size else "windows"
    pieces: list[_Piece] = []
    for i, stream in enumerate(streams):
        chosen = _answering(offsets[i], answers[i]) if offsets is not None and answers else None
        sizes = None if offsets is None else _byte_sizes(documents.texts[i], offsets[i])
        pieces += _pieces(stream, i, bos, size, how, chosen, sizes)
    if not pieces:
        raise DataError(f"{documents.source}: nothing to score: no conversation has an answer of the assistant's")
    ids, owners = [p.ids for p in pieces], [p.document for p in pieces]
    protocol = _protocol(window, min(size, longest), bool(bos), how, streams, ids, owners)
    tokens = sum(len(p.ids) - 1 if p.scored is None else len(p.scored) for p in pieces)
    scored = [list(range(1, len(p.ids))) if p.scored is None else p.scored for p in pieces] if answers else None
    notes = _notes(documents.source, protocol, size)
    if documents.answers and not answers:
        notes = (*notes, f"{documents.source}: this model's tokenizer does not tell which characters a token stands for, so that whole conversations are scored")
    return EvaluationWindows(ids, owners, tokens, documents.sha256, protocol, None if offsets is None else [p.bytes for p in pieces], notes, scored)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A window, its document, the bytes of its scored tokens, and which positions these are (None: all but the first)."""

    ids: list[int]
    document: int
    bytes: int
    scored: list[int] | None


def _answering(offsets: NDArray[np.int64], answers: Spans | None) -> NDArray[np.bool_] | None:
    """Which tokens `[tokens]` are the assistant's; None: all count."""
    if answers is None:
        return None
    found = np.zeros(len(offsets), np.bool_)
    for start, stop in answers:
        found |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
    return found


def _pieces(
    stream: list[int], document: int, bos: list[int], size: int, how: str, chosen: NDArray[np.bool_] | None, sizes: NDArray[np.int64] | None
) -> list[_Piece]:  # fmt: skip
    """A document's windows; those of a conversation in which nothing is scored are left out."""
    step = size - len(bos) if how != "documents" else max(1, len(stream))
    last = len(stream) - step + 1 if how == "windows" else len(stream)
    made = []
    for start in range(0, max(0, last), step):
        ids = bos + stream[start : start + step]
        positions = np.arange(1, len(ids))
        if chosen is not None:
            positions = positions[chosen[positions + start - len(bos)]]
        if len(positions):
            size_in_bytes = 0 if sizes is None else int(sizes[positions + start - len(bos)].sum())
            made.append(_Piece(ids, document, size_in_bytes, None if chosen is None else [int(p) for p in positions]))
    return made


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Non-overlapping pieces of exactly `size` ids from the start; the rest is dropped."""
    return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]


def _capped(window: int, context: int | None) -> int:
    if window < 2:
        raise DataError(f"window: {window} tokens; at least 2 are needed to score one")
    return window if context is None else min(window, context)


def _protocol(requested: int, window: int, bos: bool, how: str, streams: list[list[int]], ids: list[list[int]], owners: list[int]) -> dict[str, Any]:
    text_tokens = sum(map(len, streams))
    return {
        "description": "non-overlapping windows from the start of each document, every position after the first of a window scored, incomplete last window dropped",
        "cut": how,
        "window": window,
        "window_requested": requested,
        "stride": window - bos,
        "bos": bos,
        "windows": len(ids),
        "documents": len(streams),
        "documents_scored": len(set(owners)),
        "text_tokens": text_tokens,
        "dropped_tokens": text_tokens - sum(map(len, ids)) + bos * len(ids),
        **({"scored": "the assistant's turns"} if how == "conversations" else {}),
    }


def _notes(source: str, protocol: dict[str, Any], size: int) -> tuple[str, ...]:
    notes = []
    if size < protocol["window_requested"]:
        notes.append(f"window: {protocol['window_requested']} tokens asked for, capped at the model's context of {size}")
    if protocol["cut"] == "documents":
        notes.append(f"{source}: no document fills a window of {size} tokens; each is scored as a whole (the longest has {protocol['window']} tokens)")
    if protocol["cut"] == "windows" and protocol["dropped_tokens"] > protocol["text_tokens"] // 2:
        notes.append(f"{source}: {protocol['dropped_tokens']} of {protocol['text_tokens']} tokens lie outside full windows and are not scored; a smaller window scores more")
    if protocol["documents_scored"] == 1:
        notes.append(f"{source}: one document: its windows are taken as independent (below eight: no intervals), and figures tell of this text alone; .jsonl holds several")
    return tuple(notes)
