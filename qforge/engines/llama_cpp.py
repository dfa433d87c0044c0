"""llama.cpp as a foreign engine: runs a GGUF file in a process of its own, through the prebuilt xllamacpp wheel, and gives next-token log-probabilities."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from qforge.errors import MissingCapabilityError, ModelError
from qforge.models.cache import cache_folder

NAME = "llama.cpp"
PACKAGE = "xllamacpp"
_ADAPTER = Path(__file__).with_name("llama_cpp_adapter.py")
_BASE_S, _PER_PROMPT_S = 120.0, 15.0  # generous: one position takes about 1 s, most of it writing 49,152 probabilities as text


def interpreter() -> Path | None:
    """The Python that has xllamacpp: this one, or the one that `make engines` made; None if neither has it."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return Path(sys.executable)
    cached = cache_folder() / "engines" / "llamacpp" / "bin" / "python"
    return cached if cached.exists() else None


def missing() -> str | None:
    """Why llama.cpp cannot run here, and what to do; None if it can."""
    return None if interpreter() is not None else f"llama.cpp is not installed here: pip install 'qforge[llamacpp]' (the package {PACKAGE}, prebuilt)"


def next_token_logprobs(gguf_path: Path, prompts: Sequence[Sequence[int]], vocab_size: int, *, exact: bool = True, threads: int | None = None) -> tuple[torch.Tensor, str]:
    """Log-probabilities of the token after each prompt, by llama.cpp.

    Args:
        gguf_path: the model file.
        prompts: token ids, each prompt at least one.
        vocab_size: V.
        exact: fp32 key-value cache and no flash attention (which computes in fp16), so that what differs is the weights' own kernel.
        threads: for computing; None for all cores that the process may use.

    Returns:
        fp32 `[len(prompts), V]`, normalised, and the engine's version.
    Raises:
        MissingCapabilityError: llama.cpp is not installed, or did not answer in time.
        ModelError: llama.cpp refuses the file.
    """
    python = interpreter()
    if python is None:
        raise MissingCapabilityError(str(missing()))
    with tempfile.TemporaryDirectory(prefix="qforge-llama-") as folder:
        request, output = Path(folder) / "request.json", Path(folder) / "logprobs.bin"
        content = {
            "model": str(gguf_path.resolve()),
            "prompts": [list(map(int, p)) for p in prompts],
            "vocab_size": vocab_size,
            "context": max(map(len, prompts)) + 8,
            "threads": threads or len(os.sched_getaffinity(0)),
            "exact": exact,
            "output": str(output),
        }
        request.write_text(json.dumps(content))
        answer = _run([str(python), "-I", str(_ADAPTER), str(request)], _BASE_S + _PER_PROMPT_S * len(prompts), gguf_path)
        data = np.fromfile(output, dtype=np.float32)
    if data.size != len(prompts) * vocab_size:
        raise ModelError(f"llama.cpp gave {data.size} log-probabilities for {gguf_path.name} where {len(prompts)} x {vocab_size} were asked for")
    # its server normalises with an fp32 sum, which is off by 2e-4 over a whole vocabulary; all of it is here, so normalise again
    return torch.log_softmax(torch.from_numpy(data).view(len(prompts), vocab_size).double(), -1).float(), str(answer["version"])


def _run(command: list[str], timeout_s: float, gguf_path: Path) -> dict[str, object]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as e:
        raise MissingCapabilityError(f"llama.cpp did not answer within {math.ceil(timeout_s)} s on {gguf_path.name}; the machine may be busy, run again later") from e
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if "version" not in answer:
        log = [line for line in done.stderr.splitlines() if "error" in line.lower() or "failed" in line.lower()]
        reason = answer.get("error") or (log[-1].strip() if log else f"it ended with exit code {done.returncode}")
        raise ModelError(f"llama.cpp could not run {gguf_path.name}: {reason}")
    found: dict[str, object] = answer
    return found
