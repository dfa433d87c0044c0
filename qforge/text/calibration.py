"""Documents -> the token sequences that calibration runs through the model."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from qforge.errors import DataError
from qforge.text.builtin import builtin_files
from qforge.text.chat import Rendered, begins_with_bos, render_plain
from qforge.text.documents import Documents, from_texts
from qforge.text.records import jsonl_texts
from qforge.text.windows import cut, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TOKENS = 6  # enough to set a subject and a language; the rest is the model's own
Writer = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Token sequences of equal length.

    Attributes:
        ids: int64 `[samples, length]`.
        tokens: `ids.numel()`.
        kept: tokens of text in `ids` (`tokens` without the BOS of each sequence).
        dropped: tokens of text left out (sequences not chosen, and the rest of the stream).
        sha256: hex SHA-256 of `ids` as little-endian int64, after the shape in decimal.
        text_sha256: as `Documents.sha256`.
        source: as the user wrote it.
        notes: what a user should know (fewer samples than asked for, a capped length).
    """

    ids: torch.Tensor
    tokens: int
    kept: int
    dropped: int
    sha256: str
    text_sha256: str
    source: str
    notes: tuple[str, ...] = ()


def calibration_set(documents: Documents, tokenizer: PreTrainedTokenizerBase, *, samples: int, sequence_length: int, seed: int, context: int | None = None) -> CalibrationSet:
    """Join the documents (the tokenizer's EOS between them, where it has one), cut the stream into sequences and choose `samples` of them.

    The choice is a seeded draw without replacement, kept in the order of the text; all are taken when there are fewer. Each sequence begins with the BOS where the
    tokenizer puts one before plain text. A text shorter than one sequence is one shorter sequence.

    Raises:
        DataError: no tokens, or `samples` or `sequence_length` out of range.
    """
    if samples < 1 or sequence_length < 2:
        raise DataError(f"calibration: samples {samples}, sequence_length {sequence_length}; at least 1 and 2 are needed")
    length = sequence_length if context is None else min(sequence_length, context)
    bos = [int(tokenizer.bos_token_id)] if begins_with_bos(tokenizer) else []
    stream = _join(token_ids(documents.texts, tokenizer), tokenizer.eos_token_id)
    if not stream:
        raise DataError(f"{documents.source}: the text has no tokens; calibration needs some")
    pieces = cut(stream, length - len(bos)) or [stream]
    chosen = sorted(random.Random(seed).sample(range(len(pieces)), min(samples, len(pieces))))
    ids = torch.tensor([bos + pieces[i] for i in chosen], dtype=torch.int64)
    kept = ids.numel() - len(bos) * len(chosen)
    notes = _notes(documents.source, samples, sequence_length, length, ids)
    return CalibrationSet(ids, ids.numel(), kept, len(stream) - kept, ids_sha256(ids), documents.sha256, documents.source, notes)


def ids_sha256(ids: torch.Tensor) -> str:
    """Hex SHA-256 of the shape in decimal and the ids as little-endian int64."""
    shape = "x".join(map(str, ids.shape)).encode() + b"\0"
    return hashlib.sha256(shape + ids.contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def generated(write: Writer, tokenizer: PreTrainedTokenizerBase, *, samples: int, sequence_length: int, seed: int) -> Documents:
    """Documents that the model writes itself, each from the first few tokens of a built-in document.

    Args:
        write: `(prompts, num_tokens) -> continuations`: token ids of `len(prompts)` prompts to those of up to `num_tokens` tokens that the model samples after each.
        tokenizer: the model's.
        samples: how many texts.
        sequence_length: tokens of each, its first few included.
        seed: chooses the openings (the writer has a seed of its own).

    Raises:
        DataError: the model wrote nothing but blanks.
    """
    first = builtin_files("calibration")[0]
    texts = [r.text for r in jsonl_texts(first.read_text("utf-8"), first.name, lambda messages, where: Rendered(render_plain(messages)))]
    chosen = random.Random(seed).choices(texts, k=samples)
    bos = [int(tokenizer.bos_token_id)] if begins_with_bos(tokenizer) else []
    openings = [ids[:PROMPT_TOKENS] for ids in token_ids([text[:400] for text in chosen], tokenizer)]
    written = write([bos + ids for ids in openings], max(1, sequence_length - PROMPT_TOKENS))
    return from_texts("generated", [str(tokenizer.decode(ids + more, skip_special_tokens=True)) for ids, more in zip(openings, written, strict=True)])


def with_generated(chosen: CalibrationSet, write: Writer, *, more: int) -> CalibrationSet:
    """Further sequences as long as the chosen ones, each continued by the model from the first few tokens of one of them.

    Args:
        chosen: sequences of text.
        write: as for `generated`; every continuation has all the tokens that are asked for.
        more: how many.
    """
    samples, length = chosen.ids.shape
    openings = [chosen.ids[i % samples, : min(PROMPT_TOKENS, length - 1)].tolist() for i in range(more)]
    written = write(openings, length - len(openings[0]))
    ids = torch.cat([chosen.ids, torch.tensor([ids + more for ids, more in zip(openings, written, strict=True)], dtype=torch.int64)])
    return replace(chosen, ids=ids, tokens=ids.numel(), sha256=ids_sha256(ids))


def _join(streams: list[list[int]], eos: int | None) -> list[int]:
    """One stream; an EOS after each document but the last, unless the document ends with one (a chat template may write it, with a line end behind)."""
    joined: list[int] = []
    for i, ids in enumerate(streams):
        joined += ids
        if eos is not None and ids and eos not in ids[-2:] and i < len(streams) - 1:
            joined.append(eos)
    return joined


def _notes(source: str, samples: int, requested: int, length: int, ids: torch.Tensor) -> tuple[str, ...]:
    notes = []
    if length < requested:
        notes.append(f"calibration: sequence_length {requested} capped at the model's context of {length}")
    if ids.shape[1] < length:
        notes.append(f"{source}: the text is shorter than one sequence of {length} tokens; one sequence of {ids.shape[1]} is used")
    elif len(ids) < samples:
        notes.append(f"{source}: {samples} samples asked for, the text gives {len(ids)} of {length} tokens")
    return tuple(notes)
