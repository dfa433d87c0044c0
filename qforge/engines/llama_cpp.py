"""llama.cpp as a foreign engine: runs a GGUF file in a process of its own, through the prebuilt xllamacpp wheel, and gives next-token log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from qforge.engines import foreign
from qforge.errors import MissingCapabilityError, ModelError

NAME = "llama.cpp"
PACKAGE = "xllamacpp"
_ADAPTER = Path(__file__).with_name("llama_cpp_adapter.py")
_BASE_S, _PER_PROMPT_S = 120.0, 15.0  # generous: one position takes about 1 s, most of it writing 49,152 probabilities as text


def interpreter() -> Path | None:
    """The Python that has xllamacpp: this one, or the one that `make engines` made; None if neither has it."""
    return foreign.interpreter(PACKAGE, "llamacpp")


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
    request = {
        "prompts": [list(map(int, p)) for p in prompts],
        "vocab_size": vocab_size,
        "context": max(map(len, prompts)) + 8,
        "exact": exact,
        **({} if threads is None else {"threads": threads}),
    }
    answer, data = foreign.ask(python, _ADAPTER, request, engine=NAME, model=gguf_path, timeout_s=_BASE_S + _PER_PROMPT_S * len(prompts))
    if data.size != len(prompts) * vocab_size:
        raise ModelError(f"llama.cpp gave {data.size} log-probabilities for {gguf_path.name} where {len(prompts)} x {vocab_size} were asked for")
    # its server normalises with an fp32 sum, which is off by 2e-4 over a whole vocabulary; all of it is here, so normalise again
    return torch.log_softmax(torch.from_numpy(data).view(len(prompts), vocab_size).double(), -1).float(), str(answer["version"])
