"""Time and peak resident memory of stages, as the operating system accounts them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from qforge.clock import Clock
from qforge.files import write_text
from qforge.ops.pages import return_free_heap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


class Meter:
    """Seconds and peak resident bytes by stage name, resident bytes by moment; a stage that runs twice adds up its seconds and keeps its larger peak.

    `clock`: the parts of quantizing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clock = Clock()
        self._recalled = False
        self.peaks: dict[str, int] = {}
        self.resident = {"at start": _status("VmRSS")}

    def mark(self, moment: str) -> None:
        """Remember how much is resident now."""
        self.resident[moment] = _status("VmRSS")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a block of work, which finds the memory of those before it given back."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # restarts the peak counter of this process (proc(5))
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.peaks[name] = max(self.peaks.get(name, 0), _status("VmHWM"))

    def keep(self, path: Path) -> None:
        """Remember this run's figures, so that a later run that finds all work done can state what the work took."""
        write_text(path, json.dumps({"seconds": self.seconds, "peaks": self.peaks, "resident": self.resident, "parts": self.clock.seconds}))

    def recall(self, path: Path) -> None:
        """State the figures of the run that did the work, instead of this one's; stays as it is when none are kept."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            kept = json.loads(path.read_text())
            self.seconds, self.peaks, self.resident, self.clock.seconds, self._recalled = *(kept[k] for k in ("seconds", "peaks", "resident", "parts")), True

    def peak(self) -> int:
        """Largest resident size of the process so far (or of the recalled run), bytes."""
        return max([0 if self._recalled else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, *self.peaks.values()])


@contextlib.contextmanager
def reusing_freed_memory(*, sparing: bool = False) -> Iterator[None]:
    """While open, freed blocks of up to 1 GiB are kept for the next one: where logits of a whole vocabulary come anew for every few positions, a third of the time went
    into page faults (stories15M, 6 steps of tuning when they did: 13.6 and 8.1 s). Only for blocks of few sizes: others leave holes.

    Args:
        sparing: what `return_freed_memory` was told; then nothing is kept.
    """
    if not sparing:
        _set_malloc(1 << 30, 2 << 30)
    try:
        yield
    finally:
        return_freed_memory(sparing=sparing)
        return_free_heap()


def return_freed_memory(*, sparing: bool = False) -> None:
    """Let freed blocks of 4 MiB and more go back to the operating system at once, and what is free at the end of the heap beyond 16 MiB.

    Blocks come and go by the hundred while a model streams through; those that glibc keeps (all below 32 MiB) raised the peak of quantizing the demo model from 647 to 831 MiB.
    Returning those of 1 MiB, too, cost a quarter to a third more time in page faults; one heap for all threads saves 34 MiB. Does nothing where the C library has no such settings.

    Args:
        sparing: also those from 256 KiB on: holes between small blocks are not ours to keep under a memory limit (50 MiB in a model 256 wide; large models' are above 4 MiB).
    """
    _set_malloc(256 << 10 if sparing else 4 << 20, 16 << 20)


def _set_malloc(mmap_threshold: int, trim_threshold: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for setting, value in ((_M_MMAP_THRESHOLD, mmap_threshold), (_M_TRIM_THRESHOLD, trim_threshold), (_M_ARENA_MAX, 1)):
            libc.mallopt(setting, value)


def _status(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
