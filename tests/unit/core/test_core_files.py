"""Files are whole or absent, folders are locked, errors of the operating system are readable."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qforge.errors import OutputError
from qforge.files import atomic, atomic_folder, lock, readable_errors, sha256_tree, size_of, write_text, write_texts


def fail_after_writing(path: Path) -> None:
    path.write_text("half")
    raise ZeroDivisionError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic(path) as temporary:
        fail_after_writing(temporary)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sync = tmp_path / "new", os.fsync
    write_texts(folder, {"a": "1", "b": "2"})
    full = iter([False, True])

    def synced(handle: int) -> None:
        if next(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(OutputError, match=r"disk is full: writing .*b failed"):
        write_texts(folder, {"a": "3", "b": "4"})
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"a": "1", "b": "2"}


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("one", "two"):
        with atomic_folder(folder) as temporary:
            (temporary / content).write_text(content)
    assert os.listdir(folder) == ["two"]
    with pytest.raises(ZeroDivisionError), atomic_folder(folder) as temporary:
        fail_after_writing(temporary / "three")
    assert os.listdir(tmp_path) == ["model"]
    assert os.listdir(folder) == ["two"]


@pytest.mark.parametrize(("number", "text"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot write"), (errno.EROFS, "choose another place"), (None, "disk is full")])
def test_operating_system_errors_become_one_clear_message(number: int, text: str) -> None:
    with pytest.raises(OutputError, match=text), readable_errors(Path("x")):
        raise OSError(number, os.strerror(number)) if number else OSError("4096 requested and 3176 written")


def test_a_locked_folder_is_refused_and_freed_by_the_end_of_its_process(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from qforge.files import lock\nwith lock(Path({str(tmp_path)!r})): print('locked', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(OutputError, match="in use by another"), lock(tmp_path):
            pass
        other.kill()
    with lock(tmp_path):
        pass


def test_tree_hash_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x").write_text("1")
        (tmp_path / name / "y").write_text("22")
    assert sha256_tree(tmp_path / "a") == sha256_tree(tmp_path / "b")
    assert size_of(tmp_path / "a") == 3
    (tmp_path / "b" / "y").rename(tmp_path / "b" / "z")
    assert sha256_tree(tmp_path / "a") != sha256_tree(tmp_path / "b")
