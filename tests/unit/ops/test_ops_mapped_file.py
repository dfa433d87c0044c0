"""Mapped files that move into huge pages: same bytes at the same addresses, also for those who read meanwhile."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qforge.ops.native_module import context, missing, module
from qforge.ops.pages import huge_pages

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MIB = 1 << 20
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
    assert size < 16 * MIB or huge_kib(address, size) * 1024 > size / 2  # where memory lies in pieces there may be small pages between


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
    made(tmp_path / "file", 64 * MIB)
    for seconds in (0.0, 0.02, 0.02):
        file = mapped(tmp_path / "file")
        file.move_later(seconds)
        del file
    end = time.monotonic() + 30
    while (lines := Path("/proc/self/maps").read_text()).count(str(tmp_path)):
        assert time.monotonic() < end, lines
        time.sleep(0.01)


def test_what_cannot_be_mapped_is_an_error_of_the_system(tmp_path: Path) -> None:
    made(tmp_path / "file", 10)
    native: Any = module()
    with open(tmp_path / "file", "rb") as f:
        number = f.fileno()
        with pytest.raises(OSError, match="Invalid argument"):
            native.MappedFile(number, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.MappedFile(number, 10)


@pytest.mark.parametrize(("said", "expected"), [("[always] madvise never", True), ("always [madvise] never", True), ("always madvise [never]", False), (None, False)])
@pytest.mark.skipif(os.name != "posix" or not Path("/proc").exists(), reason="not Linux")
def test_huge_pages_are_where_the_system_says_so(tmp_path: Path, said: str | None, expected: bool) -> None:
    if said is not None:
        (tmp_path / "enabled").write_text(said)
    assert huge_pages(tmp_path / "enabled") is expected
