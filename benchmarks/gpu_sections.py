"""A check in sections, each with its share of the time: it ends when it must, whatever hangs, and what it has found by then is kept.

The sections run in a process of their own, which writes each row as it comes and goes on to the next section once a section's time is up (what one leaves, the next ones have). The
process that started it ends it, and all that it has started, when the whole time is up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = Callable[[dict[str, Any], Callable[[], float]], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a check.

    Attributes:
        name: under which its rows are kept, a list.
        seconds: its share of the time.
        rows: from what was found before and the seconds that are left to it, row by row. What it raises is kept, and ends the section alone.
    """

    name: str
    seconds: float
    rows: Rows


def run(sections: Sequence[Section], path: Path, skip: Callable[[str, dict[str, Any]], str | None] = lambda name, found: None) -> dict[str, Any]:
    """Run all sections, one after the other.

    Args:
        path: where everything that was found is written after every row, as JSON.
        skip: for a section and what was found before: None, or why it is left out.

    Returns:
        Rows by section, and under `unfinished` by name why a section is not whole.
    """
    found: dict[str, Any] = {"unfinished": {s.name: "not begun when the time was up" for s in sections}, **{s.name: [] for s in sections}}
    until = time.monotonic()
    for section in sections:
        until += section.seconds
        reason = skip(section.name, found) or _fill(found, section, until, path)
        if reason is None:
            del found["unfinished"][section.name]
        else:
            found["unfinished"][section.name] = reason
        _write(path, found)
    return found


def _fill(found: dict[str, Any], section: Section, until: float, path: Path) -> str | None:
    """Append a section's rows; None, or why they are not all."""

    def left() -> float:
        return until - time.monotonic()

    rows = section.rows(found, left)
    found["unfinished"][section.name] = "stopped when the time was up"  # what stands there if this process is ended
    try:
        while left() > 0:
            try:
                found[section.name].append(next(rows))
            except StopIteration:
                return None
            _write(path, found)
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {e}"[:500]
    return f"its {section.seconds:g} s were up"


def _write(path: Path, found: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    os.replace(new, path)


def watched(command: Sequence[str], path: Path, seconds: float) -> dict[str, Any]:
    """What the process `command`, which calls `run` on this path, has found when it ends, or when it is ended after so many seconds. Empty where it found nothing."""
    path.unlink(missing_ok=True)
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return dict(json.loads(path.read_text())) if path.exists() else {}
