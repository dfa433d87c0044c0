"""Who uses a cache of keys and values: engines, and windows that are read, one at a time. Standard library only."""

from __future__ import annotations

import threading
import weakref

from qforge.errors import UnsupportedError
from qforge.runtime.blocks import BlockPool


class CacheTurn:
    """The turn to use the blocks of a cache, `pool`. Whoever is gone without giving it back no longer has it, and nobody who takes it finds a block held."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._changed = threading.Condition()
        self._user: weakref.ref[object] | None = None
        self._thread: int | None = None  # of a call that has it, and gives it back by itself

    def take(self, user: object, *, call: bool = False) -> None:
        """Take the turn, or keep it. A `call` waits for those of other threads.

        Raises:
            UnsupportedError: another has it, who may never give it back.
        """
        with self._changed:
            while self._of_another(user):
                if not call or self._thread in (None, threading.get_ident()):
                    raise UnsupportedError(
                        "another engine of this LLM, or a window that score() is reading, is in use, and both would write the same keys and values; "
                        "finish it first, give all requests to one engine, or open a second LLM"
                    )
                self._changed.wait(1.0)  # who is gone tells nobody
            if self._user is None or self._user() is not user:
                self.pool.reclaim()
                self._user, self._thread = weakref.ref(user), threading.get_ident() if call else None

    def give_back(self, user: object) -> None:
        """Let the next one use the cache; nothing where `user` has not the turn."""
        with self._changed:
            if self._user is not None and self._user() is user:
                self._user = None
                self._changed.notify_all()

    def _of_another(self, user: object) -> bool:
        return self._user is not None and self._user() not in (None, user)
