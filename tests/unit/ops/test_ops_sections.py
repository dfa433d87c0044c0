"""The GPU check's time: sections that take too long, fail or hang, with sections that are none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))
import gpu_sections
from gpu_sections import Section

HANGS = """
import subprocess, sys, time
sys.path.append(sys.argv[1])
from pathlib import Path
from gpu_sections import Section, run

def quick(found, left):
    yield from range(3)

def hangs(found, left):
    yield "first"
    subprocess.run([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(613)"])

run([Section("quick", 5, quick), Section("hangs", 5, hangs), Section("never", 5, quick)], Path(sys.argv[2]))
"""


def counting(count: int, seconds: float) -> Callable[[dict[str, Any], Callable[[], float]], Iterator[int]]:
    def rows(found: dict[str, Any], left: Callable[[], float]) -> Iterator[int]:
        for i in range(count):
            time.sleep(seconds)
            yield i

    return rows


def fails(found: dict[str, Any], left: Callable[[], float]) -> Iterator[int]:
    yield len(found["whole"])
    raise ValueError("no such kernel")


def test_a_section_that_takes_too_long_or_fails_keeps_its_rows_and_the_others(tmp_path: Path) -> None:
    sections = [
        Section("whole", 1, counting(4, 0)),
        Section("slow", 0.3, counting(1000, 0.05)),
        Section("broken", 1, fails),
        Section("left out", 1, fails),
        Section("last", 1, counting(2, 0)),
    ]
    start = time.monotonic()
    found = gpu_sections.run(sections, tmp_path / "found.json", lambda name, found: "nobody asked" if name == "left out" else None)
    assert time.monotonic() - start < 10
    assert (found["whole"], found["broken"], found["left out"], found["last"]) == ([0, 1, 2, 3], [4], [], [0, 1])
    assert 0 < len(found["slow"]) < 1000
    assert found["unfinished"] == {"slow": "its 0.3 s were up", "broken": "ValueError: no such kernel", "left out": "nobody asked"}


def test_what_one_section_leaves_the_next_one_has(tmp_path: Path) -> None:
    seen: list[float] = []

    def watch(found: dict[str, Any], left: Callable[[], float]) -> Iterator[int]:
        seen.append(left())
        yield 1

    gpu_sections.run([Section("short", 20, counting(1, 0)), Section("long", 5, watch)], tmp_path / "found.json")
    assert 20 < seen[0] <= 25


def test_a_section_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program, path = tmp_path / "check.py", tmp_path / "found.json"
    program.write_text(HANGS)
    start = time.monotonic()
    found = gpu_sections.watched([sys.executable, str(program), str(ROOT / "benchmarks"), str(path)], path, 6)
    assert time.monotonic() - start < 60
    assert (found["quick"], found["hangs"], found["never"]) == ([0, 1, 2], ["first"], [])
    assert found["unfinished"] == {"hangs": "stopped when the time was up", "never": "not begun when the time was up"}
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "time.sleep(613)" not in left


def test_a_check_that_finds_nothing_is_empty(tmp_path: Path) -> None:
    assert gpu_sections.watched([sys.executable, "-c", "raise SystemExit(5)"], tmp_path / "found.json", 30) == {}
