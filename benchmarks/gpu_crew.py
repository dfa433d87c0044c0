"""What a GPU check does without timing it, in several processes at once: most of it is compiling kernels, and what one process has compiled the next ones find on the disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.pool import IMapUnorderedIterator, Pool
from typing import Any

import torch

PROCESSES = max(1, min(10, (os.cpu_count() or 1) - 2))
_TASKS = 8  # of a process: a kernel that went astray spoils its process's device for good


class Crew:
    """Processes that share work.

    Args:
        work: by name of a part, its tasks: (function of a module, arguments), both picklable. All are begun in this order when the first part is asked for.
    """

    def __init__(self, work: Mapping[str, Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]]) -> None:
        self._work, self._pool = work, None
        self._given: dict[str, IMapUnorderedIterator[Any]] = {}

    def rows(self, part: str, left: Callable[[], float]) -> Iterator[Any]:
        """What the tasks of a part return, as they are done; TimeoutError where that takes longer than is left."""
        pool = self._pool = self._pool or self._begin()
        if not self._given:
            self._given = {name: pool.imap_unordered(_called, tasks) for name, tasks in self._work.items()}
        for _ in self._work[part]:
            try:
                yield self._given[part].next(max(0.0, left()))
            except multiprocessing.TimeoutError:
                raise TimeoutError("not all of it was done when its time was up") from None

    def end(self) -> None:
        """End all processes, whatever they do: what is timed from now on is alone."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    @staticmethod
    def _begin() -> Pool:
        return multiprocessing.get_context("spawn").Pool(PROCESSES, _start, maxtasksperchild=_TASKS)


def _start() -> None:
    torch.set_num_threads(max(1, 2 * (os.cpu_count() or 1) // PROCESSES))


def _called(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, arguments = task
    return function(*arguments)
