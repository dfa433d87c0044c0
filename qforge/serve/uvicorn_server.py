"""Bind, announce, serve until told to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from qforge.errors import UnsupportedError

if TYPE_CHECKING:
    from starlette.applications import Starlette

_GRACE_S = 5  # for requests that run when the server is told to end
_ANSWERS_S = 3  # for those that are ended then to say so


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which listens when the server runs: until then clients are refused, and do not wait for an answer. Port 0: any that is free.

    Raises:
        UnsupportedError: the address is not this machine's, or taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _bound(socket.socket(family, socket.SOCK_STREAM), (host, port))
    except (OSError, OverflowError) as e:
        number = e.errno if isinstance(e, OSError) else None
        why = os.strerror(number) if number is not None and number > 0 else getattr(e, "strerror", None) or e  # not socket's words, which say the address once more
        raise UnsupportedError(f"cannot listen on {host}, port {port}: {why}; choose another --host or --port") from e


def _bound(made: socket.socket, address: tuple[str, int]) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server before may have left connections that are not quite over
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def server_of(app: Starlette, stop: Callable[[], None]) -> uvicorn.Server:
    """A server that ends without an error when SIGINT or SIGTERM asks it to: what runs has some seconds; then, or when it is asked again, `stop` ends it."""
    return _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S + _ANSWERS_S, lifespan="on"), stop)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = threading.Thread(target=stop, daemon=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which at the end of its patience would cancel what runs without an answer."""
        later = asyncio.get_running_loop().call_later(_GRACE_S, self._end_all)
        await super().shutdown(sockets)
        later.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second time, what runs is ended at once; the third time uvicorn leaves."""
        if self.should_exit and not self._stop.ident:
            self._end_all()
        else:
            super().handle_exit(sig, frame)

    def _end_all(self) -> None:
        if not self._stop.ident:
            self._stop.start()

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
