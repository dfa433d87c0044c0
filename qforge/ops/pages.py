"""Memory straight from the system, in huge pages where it has them, and back to it. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SIZE = 2 << 20  # bytes; others are not asked for


def huge_pages(settings: Path = _SETTINGS) -> bool:
    """Whether `anonymous` memory may be in huge pages of 2 MiB (Linux's Documentation/admin-guide/mm/transhuge.rst)."""
    with contextlib.suppress(OSError, ValueError):
        return sys.platform == "linux" and "[never]" not in (settings / "enabled").read_text() and int((settings / "hpage_pmd_size").read_text()) == _SIZE
    return False


def anonymous(size: int) -> mmap.mmap:
    """`size` bytes of zeros; a page is taken when it is first written.

    Raises:
        OSError, OverflowError, ValueError: the system has less, or cannot address as much.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory, Python's default, gets no huge pages
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a hint, which a kernel built without them does not know
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def return_free_heap() -> None:
    """Give the system what is free between blocks of the heap (malloc_trim(3)); nothing where the C library has no such call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
