"""A headless Chromium, spoken to over its debugging pipe (Chrome DevTools Protocol, messages that end in a zero byte): what a page looks like and complains of."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page. Use as a context manager."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours_out, theirs_in = os.pipe()
        theirs_out, ours_in = os.pipe()
        self._read, self._write = theirs_out, theirs_in
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours_out, ours_in)]

        def descriptors() -> None:
            """The protocol is spoken on descriptors 3 and 4 of the browser."""
            for fd, wanted in zip(high, (3, 4), strict=True):
                os.dup2(fd, wanted)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], preexec_fn=descriptors, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=profile.parent
        )
        for fd in high:
            os.close(fd)
        os.close(ours_out)
        os.close(ours_in)
        self._left, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)

    _session = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": self._session} if self._session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._left:
            assert select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0], "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser is gone"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show a file in a window of a width in CSS pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.ask("Page.navigate", url=page.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next(60))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """The whole page as PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
        return path

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and every request beyond the page itself."""
        found = [json.dumps(e["params"]) for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")]
        requests = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return found + [url for url in requests[1:] if not url.startswith("data:")]
