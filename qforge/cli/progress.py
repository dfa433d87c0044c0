"""Progress on stderr: bars where it is a terminal, silence where it is not; notes are always written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


class TerminalProgress:
    """Implements `qforge.progress.Progress`; use it in a `with` block, so that the terminal is left as it was."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def track(self, items: Iterable[T], stage: str, total: int | None = None) -> Iterator[T]:
        """Yield the items while a bar shows how far `stage` is; without a `total` or a length the bar only pulses."""
        if total is None and isinstance(items, Sized):
            total = len(items)
        task = self._bars.add_task(stage, total=total)
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)

    def note(self, text: str) -> None:
        """Write one line to stderr, above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
