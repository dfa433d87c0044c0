"""Foreign engines run in interpreters of their own: which Python has one, and one question to an adapter script (a request file in, JSON out)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qforge.errors import MissingCapabilityError, ModelError
from qforge.models.cache import cache_folder


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
        written.write_text(json.dumps({"threads": len(os.sched_getaffinity(0)), **request, "model": str(model.resolve()), "output": str(output)}))
        try:
            done = subprocess.run([str(python), "-I", str(adapter), str(written)], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as e:
            raise MissingCapabilityError(f"{engine} did not answer within {math.ceil(timeout_s)} s on {model.name}; the machine may be busy, run again later") from e
        return _answer(done, engine, model), np.fromfile(output, dtype=np.float32)


def _answer(done: subprocess.CompletedProcess[str], engine: str, model: Path) -> dict[str, Any]:
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or "version" not in answer:
        log = [line for line in done.stderr.splitlines() if "error" in line.lower() or "failed" in line.lower()]
        said = answer.get("error") if isinstance(answer, dict) else None
        raise ModelError(f"{engine} could not run {model.name}: {said or (log[-1].strip() if log else f'it ended with exit code {done.returncode}')}")
    return answer
