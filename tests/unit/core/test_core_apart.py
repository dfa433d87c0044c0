"""A separate process that fails, in whatever way, has found a problem; it has the qforge that this one has, and no file from where the user stands."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from qforge import apart

MODULE = """
import os, sys

def fine(told): pass
def blank(told): raise ValueError(" \\n")
def mute(told): raise ValueError
def said(told): raise ValueError("first\\nsecond")
def leaves(told): os._exit(1)
def leaves_content(told): os._exit(0)
def complains(told):
    print("one\\nlast words", file=sys.stderr, flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("fine", None),
        ("blank", "ValueError"),
        ("mute", "ValueError"),
        ("said", "first"),
        ("leaves", "it ends with exit code 1"),
        ("leaves_content", "it ends the process that runs it (exit code 0)"),
        ("complains", "last words"),
    ],
)
def test_every_way_to_fail_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str | None) -> None:
    (tmp_path / "strange.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert apart.problem(f"strange:{name}", [], 2, 1 << 30) == found


def test_the_process_has_the_qforge_of_this_one(tmp_path: Path) -> None:
    """Where only the parent's sys.path names it; an interpreter without qforge is that of a fresh environment."""
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the current folder')")
    root = str(Path(apart.__file__).parents[1])
    asked = "[print(problem(function, given, 2, 1 << 30)) for function, given in (('json:loads', ['{']), ('builtins:repr', []))]"
    script = f"import sys; sys.path.append({root!r}); from qforge.apart import problem; {asked}"
    done = subprocess.run([str(tmp_path / "bare" / "bin" / "python"), "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    wrong, represented = done.stdout.splitlines()
    assert "positional argument" in wrong
    assert represented == "b''"
