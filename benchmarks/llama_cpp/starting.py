"""What both sides' start is timed by (see benchmarks/startup.py); the clock is the machine's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.monotonic()
    run()
    return time.monotonic() - begin


def tell(start: Callable[[], Any], ask: Callable[[Any], object], rounds: int) -> None:
    """Print as JSON when the first token was there (`start` opens the model and asks once), and what further requests and starts take."""
    running = start()
    told = {"first": time.monotonic(), "request": [timed(lambda: ask(running)) for _ in range(rounds)]}
    print("\n" + json.dumps(told | {"warm": [timed(start) for _ in range(rounds)]}), flush=True)
