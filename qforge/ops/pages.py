"""Memory straight from the system, in huge pages where it has them. Standard library only."""

from __future__ import annotations

import contextlib
import mmap
import sys


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
