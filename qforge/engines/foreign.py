"""Foreign engines run in interpreters of their own: which Python has one, and one question to an adapter script (a request file in, JSON out)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qforge.errors import MissingCapabilityError, ModelError
from qforge.files import cache_folder
from qforge.machine_limits import default_threads


def interpreter(package: str, environment: str) -> Path | None:
    """The Python that has `package`: this one, or that of the cached `environment`, which `make engines` makes; None if neither has it."""
    if importlib.util.find_spec(package) is not None:
        return Path(sys.executable)
    cached = cache_folder() / "engines" / environment / "bin" / "python"
    return cached if cached.exists() else None


def ask(python: Path, adapter: Path, request: Mapping[str, Any], *, engine: str, model: Path, timeout_s: float) -> tuple[dict[str, Any], np.ndarray]:
    """Run an adapter.

    Args:
        python: its interpreter.
        adapter: the script; it is given the path of a JSON file with the request, `threads` and `output` added.
        request: what it is asked.
        engine: the engine's name for messages.
        model: the model file or folder.
        timeout_s: seconds that it may take.

    Returns:
        Its answer, and the fp32 values that it wrote to `output`.
    Raises:
        MissingCapabilityError: it did not answer in time.
        ModelError: it refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="qforge-engine-") as folder:
        written, output = Path(folder) / "request.json", Path(folder) / "output.bin"
        written.write_text(json.dumps({"threads": default_threads(), **request, "model": str(model.resolve()), "output": str(output)}))
        try:
            done = subprocess.run([str(python), "-I", str(adapter), str(written)], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as e:
            raise MissingCapabilityError(f"{engine} did not answer within {math.ceil(timeout_s)} s on {model.name}; the machine may be busy, run again later") from e
        return _answer(done, engine, model), np.fromfile(output, dtype=np.float32)


@contextlib.contextmanager
def stream(python: Path, adapter: Path, request: Mapping[str, Any], *, engine: str, model: Path) -> Iterator[tuple[dict[str, Any], Callable[[int], np.ndarray]]]:
    """Run an adapter that writes more than memory should hold: a line of JSON, then fp32 values, which it writes no faster than they are read.

    Args:
        python, adapter, request, engine, model: as for `ask`; there is no `output`.

    Yields:
        Its answer, and a function that gives the next so many values.
    Raises:
        MissingCapabilityError: the adapter cannot drive this version of the engine.
        ModelError: it refuses the model, or ends before it has written what is read.
    """
    with tempfile.TemporaryDirectory(prefix="qforge-engine-") as folder, (Path(folder) / "log").open("w+b") as log:
        written = Path(folder) / "request.json"
        written.write_text(json.dumps({"threads": default_threads(), **request, "model": str(model.resolve())}))
        process = subprocess.Popen([str(python), "-I", str(adapter), str(written)], stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        pipe = process.stdout

        def said() -> str:
            log.seek(0)
            return log.read().decode("utf-8", "replace")

        def read(count: int) -> np.ndarray:
            data = pipe.read(4 * count)
            if len(data) != 4 * count:
                raise ModelError(f"{engine} could not run {model.name} to the end: {_last_complaint(said()) or f'it ended with exit code {process.wait()}'}")
            return np.frombuffer(bytearray(data), np.float32)

        try:
            yield _checked(pipe.readline().decode("utf-8", "replace"), said, process.wait, engine, model), read
        finally:
            process.kill()
            process.wait()
            pipe.close()


def version_of(python: Path, package: str) -> str:
    """A package and its version in another interpreter, as its adapter names them."""
    asked = subprocess.run([str(python), "-I", "-c", f"import importlib.metadata as m; print(m.version({package!r}))"], capture_output=True, text=True, check=False)
    return f"{package} {asked.stdout.strip()}" if asked.returncode == 0 else package


def _answer(done: subprocess.CompletedProcess[str], engine: str, model: Path) -> dict[str, Any]:
    lines = done.stdout.strip().splitlines()
    return _checked(lines[-1] if lines else "", lambda: done.stderr, lambda: done.returncode, engine, model)


def _checked(line: str, log: Callable[[], str], ended: Callable[[], int], engine: str, model: Path) -> dict[str, Any]:
    """The adapter's answer, or what it says is wrong."""
    try:
        answer = json.loads(line) if line.strip() else {}
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or "version" not in answer:
        said = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(answer, dict) and "missing" in answer:
            raise MissingCapabilityError(f"{engine}: {answer['missing']}")
        raise ModelError(f"{engine} could not run {model.name}: {said or _last_complaint(log()) or f'it ended with exit code {ended()}'}")
    return answer


def _last_complaint(log: str) -> str | None:
    found = [line.strip() for line in log.splitlines() if "error" in line.lower() or "failed" in line.lower()]
    return found[-1] if found else None
