"""Functions of ours called in a separate process; untrusted files among them, with limits of time and memory: a damaged one can crash it, fill its memory or never return."""

from __future__ import annotations

import importlib
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qforge.errors import first_line

_PATIENCE = 15  # seconds on the clock for each of computing; a machine may be busy
_ENDS = {signal.SIGXCPU: "it takes too long", signal.SIGKILL: "it takes too long"}
_END = b"\n[the work has ended]"  # written last; native code can end a process with exit code 0, too
_BEGIN = "import importlib, sys; root = sys.argv.pop(1); sys.path.insert(0, root); import qforge; sys.path.remove(root); sys.path.append(root); importlib.import_module({!r}).{}()"


def command(function: str) -> list[str]:
    """The beginning of a command that calls `module:name` of ours, without arguments; what follows is the function's `sys.argv[1:]`.

    The process has the qforge that this one has, whatever named it here, and takes no Python file from the folder where the user stands: that may be a stranger's model.
    """
    module, _, name = function.partition(":")
    return [sys.executable, "-P", "-c", _BEGIN.format(module, name), str(Path(__file__).parents[1])]


def problem(function: str, arguments: Sequence[str], seconds: int, nbytes: int, told: bytes = b"") -> str | None:
    """What a function finds wrong, in a line; None if nothing. That it takes too long, too much memory, or ends its process, or that this cannot call it, is found, too.

    Args:
        function: `module:name`; called with the arguments and what is told, it returns a problem or None, or raises.
        arguments: texts.
        seconds: of computing.
        nbytes: of address space.
        told: what is too long for an argument.
    """
    words = [*command(f"{__name__}:main"), function, str(seconds), str(nbytes), *arguments]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(words, input=told, capture_output=True, timeout=_PATIENCE * (1 + seconds), env=environment, check=False)
    except subprocess.TimeoutExpired:
        return "it takes too long"
    if done.returncode < 0:
        number = signal.Signals(-done.returncode)
        return _ENDS.get(number, f"it ends the process that runs it ({number.name})")
    if done.returncode > 0:
        return next(reversed(done.stderr.decode(errors="replace").strip().splitlines()), f"it ends with exit code {done.returncode}")
    found, end, _ = done.stdout.rpartition(_END)
    return found.decode(errors="replace").strip() or None if end else "it ends the process that runs it (exit code 0)"


def main() -> None:
    """The work itself, as the process's only one: prints what is wrong, in a line."""
    function, seconds, nbytes, *arguments = sys.argv[1:]
    try:
        module, _, name = function.partition(":")
        called: Callable[..., str | None] = getattr(importlib.import_module(module), name)
        _limit(int(seconds), int(nbytes))
        found = called(*arguments, sys.stdin.buffer.read())
    except MemoryError:
        found = "it takes too much memory"
    except BaseException as e:  # panics of Rust code among it
        found = first_line(e)
    sys.stdout.buffer.write((found or "").encode(errors="replace") + _END)


def _limit(seconds: int, nbytes: int) -> None:
    seconds += math.ceil(time.process_time())  # that Python needed to begin is not the work's
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard), hard))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
