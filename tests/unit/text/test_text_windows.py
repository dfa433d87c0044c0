"""Evaluation windows and calibration sequences against the protocol, computed by hand."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers.processors import TemplateProcessing

from qforge.errors import DataError
from qforge.text.calibration import calibration_set, generated, with_generated
from qforge.text.documents import documents, from_texts
from qforge.text.overlap import overlap
from qforge.text.windows import evaluation_windows, read_otherwise

TEXT = " ".join(tiny.TEXT)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def with_bos() -> Any:
    fast = tiny.tokenizer()
    fast.bos_token = "<|im_start|>"
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    return fast


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def test_windows_of_one_document(plain: Any) -> None:
    stream = ids(plain, TEXT)
    found = evaluation_windows(from_texts("t", [TEXT]), plain, 32)
    n = len(stream) // 32
    assert found.ids == [stream[i * 32 : i * 32 + 32] for i in range(n)]
    assert found.tokens == n * 31
    assert found.protocol["dropped_tokens"] == len(stream) - n * 32
    assert (found.protocol["bos"], found.protocol["stride"], found.protocol["window"]) == (False, 32, 32)


def test_every_window_begins_with_the_bos_where_the_tokenizer_has_one(with_bos: Any) -> None:
    stream = ids(with_bos, TEXT)
    assert 1 not in stream
    found = evaluation_windows(from_texts("t", [TEXT]), with_bos, 32)
    n = len(stream) // 31
    assert found.ids == [[1, *stream[i * 31 : i * 31 + 31]] for i in range(n)]
    assert found.tokens == n * 31
    assert (found.protocol["bos"], found.protocol["stride"], found.protocol["dropped_tokens"]) == (True, 31, len(stream) - 31 * n)


@pytest.mark.parametrize("size", [16, 33])
def test_bytes_are_those_of_the_scored_tokens(plain: Any, with_bos: Any, size: int) -> None:
    text = f"{TEXT} naïve café €5 😀 {TEXT}"
    for tokenizer, unscored in ((plain, 1), (with_bos, 0)):
        found = evaluation_windows(from_texts("t", [text, TEXT]), tokenizer, size)
        assert found.bytes is not None
        spelled = [len(tokenizer.decode(w[1:]).encode()) for w in found.ids]
        whole = len(spelled) - sum("�" in tokenizer.decode(w) for w in found.ids)
        assert sum(a == b for a, b in zip(found.bytes, spelled, strict=True)) >= whole - 2  # a window's edge may lie inside of a character
        assert len(found.bytes) == len(found.ids)
        covered = found.ids[: found.documents.count(0)]
        assert unscored or abs(sum(found.bytes[: len(covered)]) - len(tokenizer.decode([i for w in covered for i in w[1:]]).encode())) <= 3


def test_documents_are_cut_on_their_own(plain: Any) -> None:
    texts = [tiny.TEXT[0], "short", tiny.TEXT[3]]
    found = evaluation_windows(from_texts("t", texts), plain, 8)
    lengths = [len(ids(plain, t)) for t in texts]
    assert found.documents == [i for i, n in enumerate(lengths) for _ in range(n // 8)]
    assert found.ids[found.documents.index(2)] == ids(plain, texts[2])[:8]
    assert found.protocol["documents_scored"] == 2


def test_documents_that_fill_no_window_are_scored_whole(plain: Any, with_bos: Any) -> None:
    texts = ["One small mill.", "The other mill by the river.", "x"]
    found = evaluation_windows(from_texts("t", texts), plain, 128)
    assert found.ids == [ids(plain, t) for t in texts[:2]]
    assert found.documents == [0, 1]
    assert (found.protocol["cut"], found.protocol["window_requested"]) == ("documents", 128)
    assert found.protocol["window"] == max(map(len, found.ids))
    assert "no document fills a window of 128" in found.notes[0]
    assert evaluation_windows(from_texts("t", texts), with_bos, 128).ids[2] == [1, *ids(with_bos, "x")]


def test_the_context_caps_the_window_and_that_is_said(plain: Any) -> None:
    found = evaluation_windows(from_texts("t", [TEXT]), plain, 4096, context=64)
    assert found.protocol["window"] == 64
    assert found.protocol["window_requested"] == 4096
    assert found.notes[0] == "window: 4096 tokens asked for, capped at the model's context of 64"


def test_that_one_document_tells_of_itself_alone_is_said(plain: Any) -> None:
    assert "one document: its windows are taken as independent" in evaluation_windows(from_texts("t", [TEXT]), plain, 64).notes[-1]
    assert evaluation_windows(from_texts("t", [TEXT, TEXT]), plain, 64).notes == ()


def test_much_dropped_text_is_said(plain: Any) -> None:
    texts = [TEXT, *["A few short words."] * 200]
    assert "a smaller window scores more" in evaluation_windows(from_texts("t", texts), plain, 64).notes[0]


def test_too_little_to_score(plain: Any) -> None:
    with pytest.raises(DataError, match="1 token in its longest document, at least 2"):
        evaluation_windows(from_texts("t", ["x"]), plain, 16)
    with pytest.raises(DataError, match="window: 1 tokens; at least 2"):
        evaluation_windows(from_texts("t", [TEXT]), plain, 1)


def test_a_megabyte_is_cut_in_seconds(plain: Any) -> None:
    text = "".join(f"{t} {i}\n" for i in range(3000) for t in tiny.TEXT)
    start = time.process_time()
    found = evaluation_windows(from_texts("t", [text]), plain, 128)
    calibration_set(from_texts("t", [text]), plain, samples=64, sequence_length=128, seed=0)
    assert len(text) > 1e6
    assert found.tokens > 2e5
    assert time.process_time() - start < 30


def test_calibration_joins_with_eos_and_reports_what_it_left(plain: Any) -> None:
    texts = [*tiny.TEXT, "Ends itself.<|endoftext|>\n", "Last."]
    stream: list[int] = []
    for text in texts[:4]:
        stream += [*ids(plain, text), 0]
    stream += ids(plain, texts[4]) + ids(plain, texts[5])
    found = calibration_set(from_texts("t", texts), plain, samples=3, sequence_length=16, seed=5)
    pieces = [stream[i : i + 16] for i in range(0, len(stream) - 15, 16)]
    assert found.ids.shape == (3, 16)
    assert found.ids.dtype == torch.int64
    where = [pieces.index(row) for row in found.ids.tolist()]
    assert where == sorted(set(where))
    assert (found.tokens, found.kept, found.dropped) == (48, 48, len(stream) - 48)


def test_calibration_is_a_seeded_draw(plain: Any) -> None:
    text = from_texts("t", ["".join(f"{t} {i}. " for i, t in enumerate(tiny.TEXT * 5))])
    draws = [calibration_set(text, plain, samples=8, sequence_length=16, seed=s) for s in (0, 0, 1)]
    assert torch.equal(draws[0].ids, draws[1].ids)
    assert draws[0].sha256 == draws[1].sha256 != draws[2].sha256
    assert not torch.equal(draws[0].ids, draws[2].ids)


def test_calibration_says_when_it_has_less_than_asked(plain: Any, with_bos: Any) -> None:
    text = from_texts("t", [TEXT])
    total = len(ids(plain, TEXT))
    few = calibration_set(text, plain, samples=1000, sequence_length=16, seed=0)
    assert few.ids.shape == (total // 16, 16)
    assert few.notes == (f"t: 1000 samples asked for, the text gives {total // 16} of 16 tokens",)
    one = calibration_set(text, with_bos, samples=4, sequence_length=4096, seed=0, context=2048)
    assert one.ids.tolist() == [[1, *ids(with_bos, TEXT)]]
    assert (one.kept, one.dropped) == (total, 0)
    assert [n.split(";")[0] for n in one.notes] == [
        "calibration: sequence_length 4096 capped at the model's context of 2048",
        "t: the text is shorter than one sequence of 2048 tokens",
    ]


@pytest.mark.parametrize(("samples", "length"), [(0, 16), (1, 1), (-3, 16)])
def test_calibration_sizes_out_of_range(plain: Any, samples: int, length: int) -> None:
    with pytest.raises(DataError, match="at least 1 and 2"):
        calibration_set(from_texts("t", [TEXT]), plain, samples=samples, sequence_length=length, seed=0)


def test_generated_text_continues_seeded_openings(plain: Any) -> None:
    asked: list[tuple[list[list[int]], int]] = []

    def write(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        asked.append((prompts, num_tokens))
        return [ids(plain, f" and then {i}") for i in range(len(prompts))]

    a, b, c = (generated(write, plain, samples=5, sequence_length=40, seed=s) for s in (0, 0, 1))
    assert a == b != c
    assert [t.endswith(f" and then {i}") for i, t in enumerate(a.texts)] == [True] * 5
    assert asked[0][1] == 34
    assert all(1 <= len(p) <= 6 for p in asked[0][0])


def test_sequences_that_the_model_writes_begin_like_the_samples(plain: Any) -> None:
    def write(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        return [[7 + i] * num_tokens for i in range(len(prompts))]

    text = calibration_set(from_texts("t", [TEXT] * 30), plain, samples=2, sequence_length=16, seed=0)
    longer = with_generated(text, write, more=3)
    assert torch.equal(longer.ids[:2], text.ids)
    assert torch.equal(longer.ids[2:, :6], text.ids[[0, 1, 0], :6])
    assert (longer.ids[2:, 6:] == torch.tensor([[7], [8], [9]])).all()
    assert (longer.tokens, longer.kept) == (5 * 16, text.kept)
    assert longer.sha256 not in (text.sha256, with_generated(text, write, more=2).sha256)


def test_overlap_of_the_same_text_is_refused() -> None:
    a, b = from_texts("a", [TEXT]), from_texts("b", [TEXT])
    assert overlap(a, b).identical
    assert "the same text" in str(overlap(a, b).refusal())


def test_overlap_of_passages() -> None:
    words = [f"w{i * 7919 % 1009}" for i in range(600)]
    evaluation = from_texts("e", [" ".join(words)])
    whole = overlap(from_texts("c", ["Before. " + " ".join(words).upper() + " After."]), evaluation)
    assert whole.shared_13gram_fraction == 1.0
    assert "overlap (0 of 1 documents, 100.0%" in str(whole.refusal())
    some = overlap(from_texts("c", [" ".join(words[:60])]), evaluation)
    assert some.shared_13gram_fraction == pytest.approx(48 / 588)
    assert some.refusal() is None
    assert "share passages" in str(some.warning())
    none = overlap(from_texts("c", [" ".join(reversed(words)), " ".join(words[:12])]), evaluation)
    assert (none.shared_13gram_fraction, none.refusal(), none.warning()) == (0.0, None, None)


def test_overlap_of_records_too_short_for_13_words() -> None:
    records = [f"Record number {i}." for i in range(10)]
    assert overlap(from_texts("c", records[:3]), from_texts("e", records)).refusal() is not None
    found = overlap(from_texts("c", ["Record number 3. \n"]), from_texts("e", records))
    assert found.shared_documents == 1
    assert found.refusal() is None
    assert "1 of 10 documents" in str(found.warning())


CHAT = [
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "The mill grinds."},
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "Wheat, é!"},
        ]
    },
    {"messages": [{"role": "user", "content": "nobody answers"}]},
    {"prompt": "2 + 2 = ", "completion": "4, the model is a function"},
    {"text": "Plain text counts as a whole."},
]


@pytest.mark.parametrize("with_a_bos", [False, True])
def test_of_conversations_the_assistants_turns_are_scored(tmp_path: Path, plain: Any, with_bos: Any, with_a_bos: bool) -> None:
    """What is scored reads back as exactly what the assistant says, its end mark included, however the windows fall; figures weigh those tokens only."""
    tokenizer = with_bos if with_a_bos else plain
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in CHAT))
    read = documents("chat.jsonl", role="evaluation", folder=tmp_path, tokenizer=tokenizer)
    for window in (8, 13, 256):
        made = evaluation_windows(read, tokenizer, window)
        assert made.scored is not None
        assert made.bytes is not None
        assert made.protocol["scored"] == "the assistant's turns"
        told = {d: "".join(str(tokenizer.decode([made.ids[w][p] for p in made.scored[w]])) for w in range(len(made.ids)) if made.documents[w] == d) for d in set(made.documents)}
        if window == 256:
            assert told[0] == "The mill grinds.<|im_end|>Wheat, é!<|im_end|>"
            assert told[2] == "4, the model is a function"
            assert 1 not in told
            assert told[3] == "Plain text counts as a whole."[0 if with_a_bos else len(tokenizer.decode(ids(tokenizer, "Plain text counts as a whole.")[:1])) :]
            assert sum(made.bytes) == sum(len(t.encode()) for t in told.values())
        assert made.tokens == sum(map(len, made.scored))
        assert all(p >= 1 for places in made.scored for p in places)
    assert documents("chat.jsonl", role="calibration", folder=tmp_path, tokenizer=tokenizer).answers == ()


def test_a_template_that_rewrites_turns_is_scored_whole(tmp_path: Path, plain: Any) -> None:
    other = copy.deepcopy(plain)
    other.chat_template = "{{ messages | length }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT[0]) + "\n")
    read = documents("chat.jsonl", role="evaluation", folder=tmp_path, tokenizer=other)
    assert evaluation_windows(read, other, 256).scored is None


def test_where_nobody_answers_nothing_is_scored(tmp_path: Path, plain: Any) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT[1]) + "\n")
    with pytest.raises(DataError, match="no conversation has an answer"):
        evaluation_windows(documents("chat.jsonl", role="evaluation", folder=tmp_path, tokenizer=plain), plain, 64)


def test_the_built_in_conversations_are_text_like_other_text(plain: Any) -> None:
    assert documents("builtin", role="evaluation", folder=Path(), tokenizer=plain).answers == ()


def test_documents_that_another_tokenizer_cuts_otherwise(plain: Any) -> None:
    other = copy.deepcopy(plain)
    other.add_tokens(["river"])
    assert ids(other, "the river") != ids(plain, "the river")
    texts = ["the mill", "the river", "a lamp"]
    assert read_otherwise(from_texts("t", texts[::2]), plain, other) == ()
    (note,) = read_otherwise(from_texts("t", texts), plain, other)
    assert "t: 1 of 3 documents are other token ids" in note
    with pytest.raises(DataError, match=r"2 of 3 documents.*their tokenizers differ"):
        read_otherwise(from_texts("t", ["the river", *texts[:2]]), plain, other)
