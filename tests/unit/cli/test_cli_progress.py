"""Progress draws on terminals only; notes always arrive."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qforge.cli.progress import TerminalProgress
from qforge.progress import Progress


def test_not_a_terminal_sees_only_notes() -> None:
    out = io.StringIO()
    with TerminalProgress(Console(file=out, force_terminal=False, width=80)) as progress:
        assert list(progress.track([1, 2, 3], "quantize")) == [1, 2, 3]
        progress.note("3 layers [done] " + "x" * 100)
    assert out.getvalue() == "3 layers [done] " + "x" * 100 + "\n"


def test_a_terminal_sees_the_stage_and_how_far_it_is() -> None:
    out = io.StringIO()
    with TerminalProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        seen = []
        for item in progress.track(iter("abc"), "quantize", total=3):
            progress._bars.refresh()
            seen.append(item)
    assert seen == ["a", "b", "c"]
    assert "quantize" in out.getvalue()
    assert "2/3" in out.getvalue()


def test_a_stage_that_breaks_off_leaves_no_bar() -> None:
    progress = TerminalProgress(Console(file=io.StringIO(), force_terminal=True))

    def work() -> None:
        for _ in progress.track(range(3), "quantize"):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), progress:
        work()
    for task in progress._bars.tasks:
        assert task.description != "quantize"


def test_it_is_what_long_work_expects(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = TerminalProgress()
    progress.note("to stderr")
    assert capsys.readouterr() == ("", "to stderr\n")
