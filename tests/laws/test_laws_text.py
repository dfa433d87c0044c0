"""Laws of windows: they partition a prefix of each document, never overlap, and are counted right."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from qforge.text.calibration import calibration_set
from qforge.text.documents import from_texts
from qforge.text.overlap import NGRAM, overlap
from qforge.text.windows import evaluation_windows


def tokenizers() -> dict[bool, Any]:
    plain, bos = tiny.tokenizer(), tiny.tokenizer()
    bos.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return {False: plain, True: bos}


TOKENIZERS = tokenizers()
TEXTS = st.lists(st.text(min_size=2, max_size=60).filter(lambda t: len(t.strip()) >= 2), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(texts=TEXTS, window=st.integers(2, 40), bos=st.booleans(), context=st.none() | st.integers(2, 30))
def test_windows_partition_a_prefix_of_each_document(texts: list[str], window: int, bos: bool, context: int | None) -> None:
    tokenizer = TOKENIZERS[bos]
    found = evaluation_windows(from_texts("t", texts), tokenizer, window, context=context)
    size = min(window, context or window)
    streams = [list(tokenizer(t, add_special_tokens=False).input_ids) for t in texts]
    assert all(len(w) >= 2 and (not bos or w[0] == 0) for w in found.ids)
    for i, stream in enumerate(streams):
        pieces = [w[bos:] for w, d in zip(found.ids, found.documents, strict=True) if d == i]
        joined = [t for piece in pieces for t in piece]
        assert joined == stream[: len(joined)]
        if found.protocol["cut"] == "windows":
            assert len(stream) - len(joined) < size - bos
            assert all(len(piece) == size - bos for piece in pieces)
        else:
            assert joined == (stream if len(stream) + bos >= 2 else [])
            assert len(stream) + bos < size
    assert found.documents == sorted(found.documents)
    assert found.tokens == sum(len(w) - 1 for w in found.ids)
    assert found.protocol["dropped_tokens"] == sum(map(len, streams)) - sum(len(w) - bos for w in found.ids)


@settings(max_examples=100, deadline=None)
@given(texts=TEXTS, samples=st.integers(1, 8), length=st.integers(2, 20), seed=st.integers(0, 5), bos=st.booleans())
def test_calibration_sequences_are_disjoint_pieces_of_the_stream(texts: list[str], samples: int, length: int, seed: int, bos: bool) -> None:
    tokenizer = TOKENIZERS[bos]
    stream: list[int] = []
    for i, text in enumerate(texts):
        stream += list(tokenizer(text, add_special_tokens=False).input_ids) + [0] * (i < len(texts) - 1)
    found = calibration_set(from_texts("t", texts), tokenizer, samples=samples, sequence_length=length, seed=seed)
    step = length - bos
    pieces = [stream[i : i + step] for i in range(0, len(stream) - step + 1, step)] or [stream]
    assert found.ids.shape == (min(samples, len(pieces)), len(pieces[0]) + bos)
    rest = iter(pieces)
    assert all(row[bos:] in rest for row in found.ids.tolist()), "each row is a piece, in the order of the text, and none is taken twice"
    assert (found.tokens, found.kept + found.dropped) == (found.ids.numel(), len(stream))


@settings(max_examples=100, deadline=None)
@given(a=st.lists(st.integers(0, 2), max_size=60), b=st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_shared_fraction_equals_the_sets_of_word_sequences(a: list[int], b: list[int]) -> None:
    def grams(words: list[int]) -> set[tuple[int, ...]]:
        return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}

    def text(words: list[int]) -> str:
        return " ".join(f"w{w}" for w in words) or "."

    want = len(grams(a) & grams(b)) / len(grams(b)) if grams(b) else 0.0
    assert overlap(from_texts("a", [text(a)]), from_texts("b", [text(b)])).shared_13gram_fraction == pytest.approx(want)
