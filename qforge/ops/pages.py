"""Memory straight from the system, in huge pages where it has them, and back to it. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages(enabled: Path = _HUGE) -> bool:
    """Whether `anonymous` memory is in huge pages (Linux's Documentation/admin-guide/mm/transhuge.rst)."""
    with contextlib.suppress(OSError):
        return sys.platform == "linux" and "[never]" not in enabled.read_text()
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
