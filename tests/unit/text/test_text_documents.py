"""Sources -> documents: every kind of record, and one clear line for every kind of wrong input."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny

from qforge.errors import DataError, MissingCapabilityError
from qforge.text.documents import documents, from_texts
from qforge.text.hub import is_hub_id

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


def read(folder: Path, name: str, content: str | bytes, tokenizer: Any) -> Any:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return documents(name, role="calibration", folder=folder, tokenizer=tokenizer)


def test_a_text_file_is_one_document_with_the_hash_of_its_bytes(tmp_path: Path, tokenizer: Any) -> None:
    content = "\ufeffOne.\r\n\r\nTwo.\rThree é.\n"
    found = read(tmp_path, "a.txt", content, tokenizer)
    assert found.texts == ("One.\n\nTwo.\nThree é.\n",)
    assert found.sha256 == hashlib.sha256(content.encode()).hexdigest()
    assert read(tmp_path, "notes.md", "# Notes\n", tokenizer).texts == ("# Notes\n",)


def test_absolute_paths_ignore_the_folder(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("Text.")
    assert documents(str(tmp_path / "a.txt"), role="evaluation", folder=Path("elsewhere"), tokenizer=tokenizer).texts == ("Text.",)


def test_every_kind_of_record(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"text": "A\u2028B"}, "plain", {"messages": CHAT}, {"prompt": "2+2=", "completion": "4"}, {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"text": "  "}]
    lines = "\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n"
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert read(tmp_path, "r.jsonl", lines, tokenizer).texts == ("A\u2028B", "plain", chat, "2+2=4", chat)


def test_a_bos_written_by_the_template_is_not_doubled(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    fast = tiny.tokenizer()
    fast.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    line = json.dumps({"messages": CHAT})
    assert read(tmp_path, "r.jsonl", line, fast).texts == ("<|endoftext|>[Hi][Hello.]",)
    fast.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert read(tmp_path, "r.jsonl", line, fast).texts == ("[Hi][Hello.]",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("e.txt", "", "empty"),
        ("blank.txt", " \n\t", "empty"),
        ("e.jsonl", "\n\n", "empty"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "not UTF-8"),
        ("wide.txt", "ab".encode("utf-16-le"), "zero bytes"),
        ("bad.jsonl", '{"text": "a"}\n{"text": \n', "bad.jsonl:2: not a JSON record"),
        ("field.jsonl", '{"body": "a"}', 'no usable field among body; allowed are "text", "messages"'),
        ("half.jsonl", '{"prompt": "a"}', "no usable field among prompt"),
        ("list.jsonl", "[1]", "not list"),
        ("type.jsonl", '{"text": 3}', '"text" must be text, not int'),
        ("mixed.jsonl", '{"prompt": "a", "completion": []}', '"completion" must be text, not list'),
        ("messages.jsonl", '{"messages": []}', "non-empty list"),
        ("content.jsonl", '{"messages": [{"role": "user", "content": [1]}]}', 'message 1 must be an object with "role" and "content"'),
        ("deep.jsonl", "[" * 100_000, "deep.jsonl:1: not a JSON record"),
        ("digits.jsonl", "9" * 5000, "digits.jsonl:1: not a JSON record"),
        ("surrogate.jsonl", '{"text": "a"}\n{"text": "\\ud800"}', "surrogate.jsonl:2: half a character"),
        ("completion.jsonl", '{"prompt": "a", "completion": "\\udfff"}', "completion.jsonl:1: half a character"),
        ("t.json", "[]", ".json is not read as text"),
    ],
)
def test_wrong_content_is_one_clear_line(tmp_path: Path, tokenizer: Any, name: str, content: str | bytes, says: str) -> None:
    with pytest.raises(DataError) as e:
        read(tmp_path, name, content, tokenizer)
    assert says in str(e.value)
    assert name in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("source", ["nowhere.txt", "buildin", "../x/nowhere.jsonl", "/nowhere/at/all", "a" * 400, "./no/file", "sub/missing.txt", "sub/missing"])
def test_a_missing_file_says_what_is_allowed(tmp_path: Path, tokenizer: Any, source: str) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match=r"no such file in .*allowed are builtin"):
        documents(source, role="calibration", folder=tmp_path, tokenizer=tokenizer)


def test_a_folder_is_no_text(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="this is a folder"):
        documents(".", role="calibration", folder=tmp_path, tokenizer=tokenizer)


def test_a_pipe_or_a_device_is_there_and_no_file(tmp_path: Path, tokenizer: Any) -> None:
    """It is not waited for."""
    os.mkfifo(tmp_path / "pipe")
    ends = os.pipe()
    for source in ("/dev/null", "pipe", f"/dev/fd/{ends[0]}"):
        with pytest.raises(DataError, match=r"a pipe, a socket or a device, and no file; write the text to a file"):
            documents(source, role="evaluation", folder=tmp_path, tokenizer=tokenizer)
    for end in ends:
        os.close(end)


def test_messages_need_a_template_that_takes_them(tmp_path: Path) -> None:
    fast = tiny.tokenizer()
    line = json.dumps({"messages": CHAT})
    fast.chat_template = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(DataError, match=r"c\.jsonl:1: the model's chat template refuses these messages: Conversation roles must alternate"):
        read(tmp_path, "c.jsonl", line, fast)
    fast.chat_template = None
    with pytest.raises(DataError, match=r"c\.jsonl:1: chat messages need a chat template"):
        read(tmp_path, "c.jsonl", line, fast)


def test_from_texts_hashes_the_boundaries_too() -> None:
    assert from_texts("a", ["x", " ", "y"]).texts == ("x", "y")
    assert from_texts("a", ["xy"]).sha256 != from_texts("a", ["x", "y"]).sha256
    with pytest.raises(DataError, match="holds no text"):
        from_texts("generated", ["", "\n"])


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


@pytest.mark.parametrize(
    ("source", "answer"), [("owner/name", True), ("owner/name:en", True), ("o/n:en:test[:10%]", True), ("o/n::test", True), ("name", False), ("a/b/c", False), ("./a", False)]
)
def test_hub_ids(source: str, answer: bool) -> None:
    assert is_hub_id(source) == answer


def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any) -> None:
    calls = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        calls.append((name, config, split, streaming))
        if split == "test":
            raise ValueError("Unknown split")
        return [{"text": "One."}, {"text": ""}, {"text": "Two."}]

    hub(monkeypatch, load)
    found = documents("owner/name:en", role="evaluation", folder=tmp_path, tokenizer=tokenizer)
    assert found.texts == ("One.", "Two.")
    assert calls == [("owner/name", "en", "test", True), ("owner/name", "en", "validation", True)]
    with pytest.raises(DataError, match=r"owner/name::test: Unknown split; name a dataset as owner/name:config:split"):
        documents("owner/name::test", role="calibration", folder=tmp_path, tokenizer=tokenizer)


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    hub(monkeypatch, load)
    with pytest.raises(MissingCapabilityError, match=r"cannot be read from the hub \(no route\)"):
        documents("owner/name", role="calibration", folder=tmp_path, tokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingCapabilityError, match="pip install datasets"):
        documents("owner/name", role="calibration", folder=tmp_path, tokenizer=tokenizer)
