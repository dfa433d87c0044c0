"""How long work tells what it does, without drawing: the command line draws, libraries and tests pass `SILENT`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """What long work calls."""

    def track(self, items: Iterable[T], stage: str, total: int | None = None) -> Iterator[T]:
        """Yield the items, showing how far the stage is."""

    def note(self, text: str) -> None:
        """One line that the user should see."""


class Silent:
    """Shows nothing."""

    def track(self, items: Iterable[T], stage: str, total: int | None = None) -> Iterator[T]:
        """Yield the items."""
        yield from items

    def note(self, text: str) -> None:
        """Drop the line."""


SILENT = Silent()
