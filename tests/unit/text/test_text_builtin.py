"""The built-in texts: what README says of them is true, every tokenizer can read them, and they do not overlap."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny

import qforge.text.builtin as builtin
from qforge.errors import MissingCapabilityError
from qforge.text.documents import documents
from qforge.text.overlap import overlap
from qforge.text.windows import evaluation_windows

DATA = builtin.builtin_folder()
ROW = re.compile(r"\| `(?P<name>[\w.]+)` \|.*\| (?P<records>[\d,]+) \| (?P<size>[\d,]+) \| `(?P<sha256>[0-9a-f]{64})` \|")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DATA / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


def test_readme_gives_hash_size_and_number_of_records_of_every_file() -> None:
    rows = {m["name"]: m for m in ROW.finditer((DATA / "README.md").read_text("utf-8"))}
    assert set(rows) == {p.name for p in DATA.iterdir() if p.suffix in (".jsonl", ".txt")} >= {*builtin.FILES["calibration"], *builtin.FILES["evaluation"]}
    for name, row in rows.items():
        content = (DATA / name).read_bytes()
        found = (hashlib.sha256(content).hexdigest(), f"{len(content):,}", f"{content.count(10):,}")
        assert found == (row["sha256"], row["size"], row["records"]), name


@pytest.mark.parametrize("role", ["calibration", "evaluation"])
def test_every_tokenizer_reads_the_builtin_text(tokenizer: Any, role: builtin.Role) -> None:
    rendered = documents("builtin", role=role, folder=Path("nowhere"), tokenizer=tokenizer)
    bare = tiny.tokenizer()
    bare.chat_template = None
    plain = documents("builtin", role=role, folder=Path("nowhere"), tokenizer=bare)
    assert len(rendered.texts) == len(plain.texts)
    assert rendered.sha256 == plain.sha256
    assert any("<|im_start|>" in text for text in rendered.texts) == (role == "calibration")
    assert not any("<|im_start|>" in text for text in plain.texts)


def test_the_builtin_texts_do_not_overlap(tokenizer: Any) -> None:
    calibration = documents("builtin", role="calibration", folder=Path(), tokenizer=tokenizer)
    evaluation = documents("builtin", role="evaluation", folder=Path(), tokenizer=tokenizer)
    found = overlap(calibration, evaluation)
    assert (found.shared_documents, found.refusal(), found.warning()) == (0, None, None)
    assert found.shared_13gram_fraction < 1e-3
    assert evaluation_windows(evaluation, tokenizer, 512).protocol["documents_scored"] == len(evaluation.texts)


def test_no_text_is_there_twice(tokenizer: Any) -> None:
    texts = documents("builtin", role="calibration", folder=Path(), tokenizer=tokenizer).texts
    assert len(set(texts)) == len(texts) > 100


def test_a_damaged_installation_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builtin, "PACKAGE", tmp_path / "a" / "qforge")
    with pytest.raises(MissingCapabilityError, match="install qforge again"):
        builtin.builtin_folder()
    (tmp_path / "a" / "calibration_data").mkdir(parents=True)
    assert builtin.builtin_folder() == tmp_path / "a" / "calibration_data"
    (tmp_path / "a" / "qforge" / "calibration_data").mkdir(parents=True)
    assert builtin.builtin_folder() == tmp_path / "a" / "qforge" / "calibration_data"


def test_generated_records_were_sound(generate: ModuleType) -> None:
    answers = []
    for line in (DATA / "generated.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        answers.append(record["messages"][1]["content"] if "messages" in record else record["text"])
    assert all(len(a) >= generate.LEAST_CHARACTERS for a in answers)


def test_what_counts_as_sound(generate: ModuleType) -> None:
    prose = tiny.TEXT[0] + " " + tiny.TEXT[3]
    assert generate.is_sound(prose)
    assert not generate.is_sound(prose[:100])
    assert not generate.is_sound("The same again. " * 30)
    assert not generate.is_sound(prose + "\ufffd")
    assert not generate.is_sound(prose + " See https://example.org for more.")


def test_the_generating_script_runs(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model")
    command = [sys.executable, DATA / "generate.py", "--model", model, "--out", tmp_path / "out.jsonl", "--limit", "3", "--tokens", "8", "--batch", "2"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, timeout=300)
    assert "3 of 3 prompts" in done.stderr
    assert (tmp_path / "out.jsonl").exists()
