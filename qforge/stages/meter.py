"""Time and peak resident memory of stages, as the operating system accounts them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qforge.clock import Clock
from qforge.files import write_text
from qforge.ops.pages import return_free_heap
from qforge.stages.journal import Journal

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
PARTED = "quantize"  # the stage whose parts the clock tells


class Meter:
    """Seconds and peak resident bytes by stage name, resident bytes by moment; a stage that runs twice adds up its seconds and keeps its larger peak. `clock`: parts of quantizing.

    All of this process alone: workers, and engines that run in processes of their own, are not counted (what the system tells of such is the largest of those that have ended,
    and a new one begins with the peak of the process that starts it).

    After `follow` and `conclude` they are figures of the work, whichever processes did it. A stage in which this process computes nothing, and a moment, has those of the process
    that did it; of another stage the peak is the largest that was seen, and seconds go on from where it was cut short, or else are those of the last time.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.clock = Clock()
        self.peaks: dict[str, int] = {}
        self.resident = {"at start": _status("VmRSS")}
        self._stage, self._since = "", 0.0  # that is open; of what is not yet added to its seconds
        self._computed: set[str] = set()
        self._path: Path | None = None
        self._kept: dict[str, Any] = {"seconds": {}, "peaks": {}, "resident": {}, "parts": {}, "open": ""}

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
        self._stage, self._since = name, time.perf_counter()
        try:
            yield
        finally:
            self._measure()
            self._stage = ""

    def follow(self, path: Path, journal: Journal) -> None:
        """Go on from the figures in a file, if there are any, and keep them there, each time before a piece of the journal appears: what is found has been measured."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            read = json.loads(path.read_text())
            self._kept = {name: read[name] for name in self._kept}
        self._path, journal.before_save = path, self._before_save
        if journal.computed:  # in a stage before this
            self._keep()

    def conclude(self) -> None:
        """From here on the figures are those of all the work: of stages that this process went through, since others are no part of it any more."""
        self._keep()
        whole = self._whole()
        self.seconds, self.peaks = ({name: whole[kind][name] for name in self.seconds} for kind in ("seconds", "peaks"))
        self.resident, self.clock.seconds = whole["resident"], whole["parts"]

    def peak(self) -> int:
        """The largest, bytes."""
        return max(self.peaks.values())

    def _before_save(self) -> None:
        if self._stage:  # what is saved between stages took none of their time
            self._computed.add(self._stage)
            self._measure()
        self._keep()

    def _measure(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self.peaks[self._stage] = max(self.peaks.get(self._stage, 0), _status("VmHWM"))
        self._since = now

    def _keep(self) -> None:
        if self._path is not None:
            write_text(self._path, json.dumps(self._whole()))

    def _whole(self) -> dict[str, Any]:
        """What was kept and what this process measured, together."""
        kept, now = self._kept, [name for name in self.seconds if name in self._computed or name not in self._kept["seconds"]]
        cut = {kept["open"]: kept["seconds"][kept["open"]]} if kept["open"] else {}
        parts = kept["parts"]
        if PARTED in now:
            before = parts if PARTED in cut else {}
            parts = {name: before.get(name, 0.0) + self.clock.seconds.get(name, 0.0) for name in before | self.clock.seconds}
        return {
            "seconds": kept["seconds"] | {name: cut.get(name, 0.0) + self.seconds[name] for name in now},
            "peaks": kept["peaks"] | {name: max(kept["peaks"].get(name, 0), self.peaks[name]) for name in now},
            "resident": self.resident | kept["resident"],
            "parts": parts,
            "open": self._stage,
        }


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
