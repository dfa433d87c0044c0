"""Memory that goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from qforge.ops.pages import return_free_heap

MIB = 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no malloc_trim in this C library")
def test_what_is_free_between_blocks_goes_back() -> None:
    blocks = [bytes([n % 251]) * 100_000 for n in range(1000)]
    kept, blocks = blocks[::10], []
    before = resident()
    return_free_heap()
    assert before - resident() > 40 * MIB
    assert [block[0] for block in kept] == [n % 251 for n in range(0, 1000, 10)]


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
