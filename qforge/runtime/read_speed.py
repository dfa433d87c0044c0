"""How fast this machine reads memory, beside which decoding is held: the bandwidth of all threads, and the last-level cache in which a small model may lie instead."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from qforge.ops.native_module import context, missing

_RUNS = 5
_LEAST_FAR, _MOST_FAR = 512 << 20, 1 << 30
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_bandwidth(threads: int | None = None) -> float | None:
    """Bytes per second that all threads together read from memory, one after the other; the best of some runs. None without the native module."""
    if missing() is not None:
        return None
    native, words = context(threads), np.ones(far_bytes(_LEAST_FAR) // 8, np.uint64)
    return float(words.nbytes / min(_timed_read(native, words) for _ in range(_RUNS)))


def far_bytes(least: int) -> int:
    """Bytes that lie in memory when all of them are read in turn: twice the last-level cache, at least `least`, at most 1 GiB."""
    return min(max(least, 2 * (last_level_cache() or 0)), max(least, _MOST_FAR))


def last_level_cache(folder: Path = _CACHES) -> int | None:
    """Bytes of the highest level of cache of the first core, as Linux states them (sysfs-devices-system-cpu); None where it does not."""
    found = [(level, size) for index in folder.glob("index*") if (level := _number(index / "level")) and (size := _number(index / "size"))]
    return max(found)[1] if found else None


def cache_note(weight_bytes: int) -> str | None:
    """What a fraction of the bandwidth has to be read with where a step's weights fit the last-level cache; None where they do not, or nobody knows."""
    size = last_level_cache()
    return f"weights may lie in the {size / 2**20:.0f} MiB last-level cache" if size is not None and weight_bytes <= size else None


def _timed_read(native: object, words: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> float:
    start = time.perf_counter()
    native.read(words.ctypes.data, len(words))  # type: ignore[attr-defined]
    return time.perf_counter() - start


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)
    except (OSError, ValueError):
        return None
