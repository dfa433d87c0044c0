"""Regular expressions that a model's files bring: matched under a limit of computing time, since one of twenty characters can take hours on a name of forty."""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType

from qforge.errors import ModelError

_SECONDS = 0.5  # of this process's computing, so that a busy machine refuses nothing
_SHOWN = 80


def matches(pattern: str, name: str, where: str) -> bool:
    """Whether a pattern matches the beginning of a name, as `re.match` does. The limit holds in the main thread, where signals are handled.

    Args:
        pattern: in Python's syntax.
        name: of a module.
        where: what holds the pattern, for a message.

    Raises:
        ModelError: it is no regular expression, or takes too long.
    """
    try:
        if threading.current_thread() is not threading.main_thread():
            return re.match(pattern, name) is not None
        before = signal.signal(signal.SIGVTALRM, _stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
        try:
            return re.match(pattern, name) is not None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
    except TimeoutError as e:
        raise ModelError(f"{where} holds the pattern '{pattern[:_SHOWN]}', which took more than {_SECONDS} s on the name '{name[:_SHOWN]}'; write it without nested repeats") from e
    except (re.error, OverflowError, RecursionError, MemoryError) as e:
        raise ModelError(f"{where} holds the pattern '{pattern[:_SHOWN]}', which is not a regular expression: {e or type(e).__name__}") from e


def _stop(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
