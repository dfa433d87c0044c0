"""A lock that threads get in the order in which they asked. Standard library only."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """As `threading.RLock`, but whoever gives it back and asks again at once is behind those who wait: a loop of steps would keep all others out for as long as it runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = self._served = 0  # numbers: handed out, and whose turn it is
        self._left: set[int] = set()  # numbers of those who went away
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        with self._changed:
            me = threading.get_ident()
            if self._owner != me:
                number, self._given = self._given, self._given + 1
                try:
                    while self._served != number:
                        self._changed.wait()
                except BaseException:  # an interrupt, which must not leave a turn that nobody takes
                    self._left.add(number)
                    if self._served == number:
                        self._next()
                    raise
                self._owner = me
            self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._next()

    def _next(self) -> None:
        self._served += 1
        while self._served in self._left:
            self._left.remove(self._served)
            self._served += 1
        if self._served != self._given:
            self._changed.notify_all()
