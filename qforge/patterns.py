"""Regular expressions that a model's files bring: matched under a limit of computing time, since one of twenty characters can take hours on a name of forty."""

from __future__ import annotations

import re
import time

from qforge.deadline import computing
from qforge.errors import ModelError

_SECONDS = 0.5  # for a match
_SECONDS_IN_ALL = 2.0  # for the slow ones among the matches of one place
_SLOW = 1e-3
_SHOWN = 80
_spent: dict[str, float] = {}  # by place


def matches(pattern: str, name: str, where: str) -> bool:
    """Whether a pattern matches the beginning of a name, as `re.match` does.

    Args:
        pattern: in Python's syntax.
        name: of a module.
        where: what holds the pattern, for a message.

    Raises:
        ModelError: it is no regular expression, or takes too long.
    """
    start = time.process_time()
    try:
        with computing(_SECONDS):
            found = re.match(pattern, name) is not None
    except TimeoutError as e:
        raise _slow(pattern, name, where) from e
    except (re.error, OverflowError, RecursionError, MemoryError) as e:
        raise ModelError(f"{where} holds the pattern '{pattern[:_SHOWN]}', which is not a regular expression: {e or type(e).__name__}") from e
    if (seconds := time.process_time() - start) > _SLOW:
        _spent[where] = _spent.get(where, 0.0) + seconds
        if _spent[where] > _SECONDS_IN_ALL:
            del _spent[where]
            raise _slow(pattern, name, where)
    return found


def _slow(pattern: str, name: str, where: str) -> ModelError:
    return ModelError(f"{where} holds the pattern '{pattern[:_SHOWN]}', which takes too long on the name '{name[:_SHOWN]}'; write it without nested repeats")
