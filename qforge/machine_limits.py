"""How many cores and how much memory this process may use: what the machine has, or what a container leaves of it (Linux's cgroups, versions 1 and 2). Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # version 1 tells of no limit by the largest number of pages


_limit: int | None = None


def default_threads() -> int:
    """Threads to compute with where nobody says otherwise: as many as `threads_limited` allows here, else `usable_cores`."""
    return _limit or usable_cores()


@contextlib.contextmanager
def threads_limited(threads: int | None) -> Iterator[None]:
    """Within it nothing of this process, and no engine that it asks, takes more threads by itself (None: than there are cores): a recipe's `run.threads`."""
    global _limit
    before, _limit = _limit, threads
    try:
        yield
    finally:
        _limit = before


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: those that it may run on, and no more than a container's quota of time pays for (a part of a core counts as one)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process may use at most: the machine's memory, or a container's limit where that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, memory_limit(root) or physical)


def free_memory(root: Path = ROOT) -> int:
    """Bytes that this process may have besides: what is free on the machine, or what a container's limits leave (files that memory can let go count as free)."""
    said = re.search(r"^MemAvailable: +(\d+) kB$", "\n".join(_lines(root / "proc/meminfo")), re.M)
    free = [1024 * int(said[1]) if said else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups(root, "memory"):
        limit, used = (_words(group / new) or _words(group / old) for new, old in (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")))
        if limit and used and limit[0].isdecimal() and used[0].isdecimal():
            files = re.findall(r"^(?:total_)?inactive_file (\d+)$", "\n".join(_lines(group / "memory.stat")), re.M)
            free.append(max(0, int(limit[0]) - int(used[0]) + max(map(int, files), default=0)))
    return min(free)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that a container leaves to this process; None without a limit."""
    found = [_words(group / "memory.max") or _words(group / "memory.limit_in_bytes") for group in _groups(root, "memory")]
    sizes = [int(words[0]) for words in found if words and words[0].isdecimal()]
    return min((n for n in sizes if 0 < n < _UNLIMITED), default=None)


def _quotas(root: Path) -> Iterator[int]:
    """Cores that each group's quota of time pays for; nothing of groups without one (`max`, -1)."""
    for group in _groups(root, "cpu"):
        words = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(words) == 2 and all(w.isdecimal() and int(w) for w in words):
            quota, period = map(int, words)
            yield -(-quota // period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, outer ones included: each may have a limit. What a container sees of its own is the roots, whatever /proc names."""
    mounted = root / "sys/fs/cgroup"
    yield mounted
    yield mounted / controller
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            parts = Path(path).parts[1:]
            if (not controllers or controller in controllers.split(",")) and ".." not in parts:
                yield from ((mounted / controller if controllers else mounted).joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
