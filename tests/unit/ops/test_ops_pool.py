"""The native thread pool, compiled by itself with a program that gives it jobs (tests/native/pool_check.cpp), also under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def _built(to: Path, *flags: str) -> Path | None:
    sources = [ROOT / "tests/native/pool_check.cpp", ROOT / "kernels/cpu/pool.cpp"]
    command = [str(COMPILER), "-std=c++20", "-O2", "-pthread", *flags, "-I", str(ROOT / "kernels/include"), *map(str, sources), "-o", str(to)]
    return to if subprocess.run(command, check=False, capture_output=True).returncode == 0 else None


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", [None, "thread"])
def test_each_task_of_each_job_runs_once(tmp_path: Path, sanitizer: str | None) -> None:
    program = _built(tmp_path / "check", *([f"-fsanitize={sanitizer}", "-g"] if sanitizer else []))
    if program is None and sanitizer:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert program is not None
    told = subprocess.run([str(program), "0", "2" if sanitizer else "20"], capture_output=True, text=True, check=False, timeout=60)
    if "unexpected memory mapping" in told.stderr:
        pytest.skip("the sanitizer does not run on this kernel")
    assert (told.returncode, told.stdout) == (0, ""), told.stderr[:2000]
