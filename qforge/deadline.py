"""Limits of computing time and memory for work on untrusted files in this process: a damaged one can ask for more than there is, or never return."""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def computing(seconds: float) -> Iterator[None]:
    """TimeoutError where the block computes for longer: seconds of this process, so that a busy machine is not slow. Holds in the main thread, where signals are handled.

    Python drops what is raised within a finalizer or while garbage is collected, so it comes again after as long, and none is collected meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _stop)
    collects = gc.isenabled()
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collects:
            gc.enable()


@contextlib.contextmanager
def within_memory(nbytes: int) -> Iterator[None]:
    """MemoryError where this process asks for more address space than it has now and `nbytes` more. Holds in the main thread, on Linux, which tells how much there is."""
    told = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not told.exists():
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    present = int(told.read_text().split()[0]) * resource.getpagesize()
    limit = present + nbytes
    if before == resource.RLIM_INFINITY or limit < before:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
