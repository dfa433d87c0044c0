"""Documents -> the windows of token ids on which perplexity is measured: the one protocol behind all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qforge.errors import DataError
from qforge.text.chat import begins_with_bos
from qforge.text.documents import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """Token windows to be scored, every position after the first of each.

    Attributes:
        ids: token ids, one list a window.
        documents: for each window, the index of its document.
        tokens: number of scored positions.
        sha256: of the text, as `Documents.sha256`.
        protocol: the protocol in words and numbers; equal dictionaries mean comparable figures.
        bytes: UTF-8 bytes of text that the scored tokens of each window stand for; None where the tokenizer does not tell.
        notes: what a user should know (the window was capped, much was dropped).
    """

    ids: list[list[int]]
    documents: list[int]
    tokens: int
    sha256: str
    protocol: dict[str, Any]
    bytes: list[int] | None
    notes: tuple[str, ...] = ()


def token_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of each text as one string, without special tokens added (those that the text itself spells are kept)."""
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def _byte_ends(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[NDArray[np.int64]] | None:
    """Where each token of each text ends, in UTF-8 bytes from the text's start; a character that several tokens share ends with the first of them."""
    if not tokenizer.is_fast:
        return None
    ends = []
    for text in texts:
        offsets = tokenizer(text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        position = np.concatenate([[0], np.cumsum(sizes)])
        ends.append(np.maximum.accumulate(position[np.asarray([end for _, end in offsets], np.int64)]) if offsets else np.zeros(0, np.int64))
    return ends


def evaluation_windows(documents: Documents, tokenizer: PreTrainedTokenizerBase, window: int, *, context: int | None = None) -> EvaluationWindows:
    """Cut each document from its start into non-overlapping windows of `window` tokens and drop the rest.

    Where the tokenizer puts a BOS before plain text every window begins with it and holds `window - 1` tokens of text. When no document fills one window, each document
    is one window as it is, and the protocol says so.

    Args:
        documents: the text.
        tokenizer: the model's.
        window: tokens a window, BOS included; at least 2.
        context: the model's context in tokens: a larger window is capped, and that is said.

    Raises:
        DataError: window below 2, or no document has 2 tokens (BOS included).
    """
    size = _capped(window, context)
    bos = [int(tokenizer.bos_token_id)] if begins_with_bos(tokenizer) else []
    streams = token_ids(documents.texts, tokenizer)
    longest = max(map(len, streams)) + len(bos)
    if longest < 2:
        raise DataError(f"{documents.source}: too short to be scored: {longest} token in its longest document, at least 2 are needed")
    whole = longest < size
    ends = _byte_ends(documents.texts, tokenizer)
    ids: list[list[int]] = []
    owners: list[int] = []
    spans: list[int] = []
    for i, stream in enumerate(streams):
        pieces = cut(stream, size - len(bos)) if not whole else [stream] * (len(stream) + len(bos) >= 2)
        ids += [bos + piece for piece in pieces]
        owners += [i] * len(pieces)
        spans += [] if ends is None else _scored_bytes(ends[i], [len(p) for p in pieces], bool(bos))
    protocol = _protocol(window, min(size, longest), bool(bos), whole, streams, ids, owners)
    return EvaluationWindows(ids, owners, sum(map(len, ids)) - len(ids), documents.sha256, protocol, spans if ends is not None else None, _notes(documents.source, protocol, size))


def _scored_bytes(ends: NDArray[np.int64], lengths: list[int], bos: bool) -> list[int]:
    """Bytes of the scored tokens of consecutive windows: of all when a BOS stands before them, else of all but the first."""
    sizes = np.asarray(lengths, np.int64)
    stops = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[stops - sizes + (0 if bos else 1)]
    return [int(b) for b in ends[stops - 1] - before]


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Non-overlapping pieces of exactly `size` ids from the start; the rest is dropped."""
    return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]


def _capped(window: int, context: int | None) -> int:
    if window < 2:
        raise DataError(f"window: {window} tokens; at least 2 are needed to score one")
    return window if context is None else min(window, context)


def _protocol(requested: int, window: int, bos: bool, whole: bool, streams: list[list[int]], ids: list[list[int]], owners: list[int]) -> dict[str, Any]:
    text_tokens = sum(map(len, streams))
    return {
        "description": "non-overlapping windows from the start of each document, every position after the first of a window scored, incomplete last window dropped",
        "cut": "documents" if whole else "windows",
        "window": window,
        "window_requested": requested,
        "stride": window - bos,
        "bos": bos,
        "windows": len(ids),
        "documents": len(streams),
        "documents_scored": len(set(owners)),
        "text_tokens": text_tokens,
        "dropped_tokens": text_tokens - sum(map(len, ids)) + bos * len(ids),
    }


def _notes(source: str, protocol: dict[str, Any], size: int) -> tuple[str, ...]:
    notes = []
    if size < protocol["window_requested"]:
        notes.append(f"window: {protocol['window_requested']} tokens asked for, capped at the model's context of {size}")
    if protocol["cut"] == "documents":
        notes.append(f"{source}: no document fills a window of {size} tokens; each is scored as a whole (the longest has {protocol['window']} tokens)")
    if protocol["dropped_tokens"] > protocol["text_tokens"] // 2:
        notes.append(f"{source}: {protocol['dropped_tokens']} of {protocol['text_tokens']} tokens lie outside full windows and are not scored; a smaller window scores more")
    return tuple(notes)
