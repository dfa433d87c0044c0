"""An engine in a process of its own that times what it is asked for, and stands still while another is asked."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "llama_cpp"


class Engine:
    """A script of benchmarks/llama_cpp that ends in `load.serve`, with its answer about itself in `about`.

    Raises:
        SystemExit: it ended by itself, with the last of what it had to say.
    """

    def __init__(self, python: Path, script: str, request: dict[str, Any], folder: Path) -> None:
        file, self._script, self._said = folder / f"{script}.json", script, folder / f"{script}.txt"
        file.write_text(json.dumps(request))
        with self._said.open("w") as said:
            command = [str(python), str(HERE / script), str(file)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace", preexec_fn=_ends_with_parent)
        try:
            self.about = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, what: str) -> dict[str, Any]:
        """What `load.serve` says to a word."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line that is JSON; then all its threads stop, also those that wait by spinning."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # an engine's own words
                found = json.loads(line)
                if isinstance(found, dict):
                    self._process.send_signal(signal.SIGSTOP)
                    return found
        raise SystemExit(f"{self._script} ended with {self._process.wait()}: {self._said.read_text(errors='replace')[-2000:]}")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()


def _ends_with_parent() -> None:
    """A stopped process would outlive us for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, prctl(2)
