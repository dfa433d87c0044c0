"""One unnamed file for what does not fit into memory. The operating system removes it, however the process ends."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from qforge.files import readable_errors


class Spill:
    """Places in a file. One that is freed is used again for the same number of bytes: sizes recur, and its pages are in the page cache already.

    Args:
        folder: where the file lies; it is made with the first place.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = 0

    def write(self, address: int, size: int) -> int:
        """Keep `size` bytes of memory; returns their place.

        Raises:
            OutputError: the disk is full.
        """
        with readable_errors(self._folder):
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._folder, buffering=0) as f:
                    self._file = os.dup(f.fileno())
            place = self._free[size].pop() if self._free[size] else self._end
            self._end = max(self._end, place + size)
            self.rewrite(place, address, size)
        return place

    def rewrite(self, place: int, address: int, size: int) -> None:
        """Keep other bytes in a place."""
        left = _bytes(address, size)
        with readable_errors(self._folder):
            while left:
                written = os.pwrite(self._file, left, place)
                place, left = place + written, left[written:]

    def read(self, place: int, address: int, size: int) -> None:
        """Read `size` bytes back into memory."""
        left = _bytes(address, size)
        while left:
            count = os.preadv(self._file, [left], place)
            assert count > 0, "the spill file ended early"
            place, left = place + count, left[count:]

    def free(self, place: int, size: int) -> None:
        """Give a place back."""
        self._free[size].append(place)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _bytes(address: int, size: int) -> memoryview:
    """Memory as bytes. (A numpy view of a tensor would do, but makes its storage one that cannot be resized.)"""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
