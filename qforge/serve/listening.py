"""Bind, announce, serve until told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from qforge.errors import UnsupportedError

if TYPE_CHECKING:
    from starlette.applications import Starlette

_GRACE_S = 5  # for requests that run when the server is told to end


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: any that is free.

    Raises:
        UnsupportedError: the address is not this machine's, or taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as e:
        number = e.errno if isinstance(e, OSError) else None
        why = os.strerror(number) if number is not None and number > 0 else getattr(e, "strerror", None) or e  # not socket's words, which say the address once more
        raise UnsupportedError(f"cannot listen on {host}, port {port}: {why}; choose another --host or --port") from e


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that ends without an error when it is asked to by SIGINT or SIGTERM."""
    return _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S, lifespan="on"))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which sends itself the signal once more at the end: an exit code that says that the process was killed."""
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before: dict[Any, Any] = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
