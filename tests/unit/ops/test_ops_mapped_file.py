"""Mapped files that move into huge pages: same bytes at the same addresses, also for those who read meanwhile."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qforge.ops.native_module import context, missing, module
from qforge.ops.pages import anonymous, huge_pages

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MIB = 1 << 20
ROOT = Path(__file__).parents[3]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
HAS_HUGE = pytest.mark.skipif(not huge_pages(), reason="no huge pages here")


def made(path: Path, size: int) -> bytes:
    content = np.random.default_rng(size).bytes(size)
    path.write_bytes(content)
    return content


def mapped(path: Path) -> Any:
    native: Any = module()
    with open(path, "rb") as f:
        return native.MappedFile(f.fileno(), path.stat().st_size)


def content_of(file: Any, size: int) -> bytes:
    return ctypes.string_at(file.address, size)


def wait(file: Any, size: int) -> None:
    end = time.monotonic() + 60
    while file.moved < size:
        assert time.monotonic() < end, file.moved
        time.sleep(0.001)


@HAS_HUGE
@pytest.mark.parametrize("size", [1, 4096, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 16 * MIB, 40 * MIB + 8, 100 * MIB])
def test_bytes_and_address_stay_and_pages_become_huge(tmp_path: Path, size: int) -> None:
    content = made(tmp_path / "file", size)
    file = mapped(tmp_path / "file")
    address = file.address
    assert content_of(file, size) == content
    assert file.moved == 0
    file.move_later(0.0)
    wait(file, size)
    assert file.address == address
    assert content_of(file, size) == content
    plain = np.frombuffer(anonymous(16 * MIB), np.uint8)
    plain[:] = 1
    if size >= 16 * MIB and huge_kib(plain.ctypes.data, 16 * MIB) * 1024 == 16 * MIB:  # the system has them at this moment
        assert huge_kib(address, size) * 1024 > size / 2


def huge_kib(address: int, size: int) -> int:
    """KiB in huge pages of the mappings that begin within."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = address <= int(span[1], 16) < address + size
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1])
    return found


@HAS_HUGE
def test_who_reads_meanwhile_reads_the_same(tmp_path: Path) -> None:
    size = 192 * MIB
    made(tmp_path / "file", size)
    file, native = mapped(tmp_path / "file"), context(2)
    expected, found, done = native.checksum(file.address, size), set(), threading.Event()

    def read() -> None:
        reader = context.__wrapped__(1)
        while not done.is_set():
            found.add(reader.checksum(file.address, size))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for r in readers:
        r.start()
    file.move_later(0.0)
    wait(file, size)
    found.add(native.checksum(file.address, size))
    done.set()
    for r in readers:
        r.join()
    assert found == {expected}


@HAS_HUGE
def test_a_file_that_nobody_holds_is_let_go(tmp_path: Path) -> None:
    size = 96 * MIB
    made(tmp_path / "file", size)
    before = resident()
    for seconds in (0.0, 0.0, 0.02):
        file = mapped(tmp_path / "file")
        content_of(file, size)
        file.move_later(seconds)
        if not seconds:
            wait(file, size)
            assert resident() > before + size / 2
        del file
    end = time.monotonic() + 30
    while resident() > before + size / 4 or str(tmp_path) in Path("/proc/self/maps").read_text():
        assert time.monotonic() < end, (before, resident())
        time.sleep(0.01)


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile")))


@HAS_HUGE
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_memory_of_others_is_left_alone(tmp_path: Path) -> None:
    sources = [ROOT / "tests/native/mapped_file_check.cpp", ROOT / "kernels/cpu/mapped_file.cpp"]
    program = tmp_path / "check"
    command = [str(COMPILER), "-std=c++20", "-O2", "-pthread", "-I", str(ROOT / "kernels/include"), *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    told = subprocess.run([str(program), str(tmp_path / "file"), "4"], capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 0, told.stderr


def test_what_cannot_be_mapped_is_an_error_of_the_system(tmp_path: Path) -> None:
    made(tmp_path / "file", 10)
    native: Any = module()
    with open(tmp_path / "file", "rb") as f:
        number = f.fileno()
        with pytest.raises(OSError, match="Invalid argument"):
            native.MappedFile(number, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.MappedFile(number, 10)


@pytest.mark.parametrize(
    ("said", "size", "expected"),
    [
        ("[always] madvise never", "2097152", True),
        ("always [madvise] never", "2097152", True),
        ("always madvise [never]", "2097152", False),
        ("[always] madvise never", "536870912", False),
        ("[always] madvise never", "", False),
        (None, None, False),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="not Linux")
def test_huge_pages_are_where_the_system_says_so(tmp_path: Path, said: str | None, size: str | None, expected: bool) -> None:
    if said is not None and size is not None:
        (tmp_path / "enabled").write_text(said)
        (tmp_path / "hpage_pmd_size").write_text(size)
    assert huge_pages(tmp_path) is expected
