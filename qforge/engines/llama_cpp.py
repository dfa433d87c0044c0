"""llama.cpp as a foreign engine: runs a GGUF file in a process of its own, through the prebuilt xllamacpp wheel, and gives next-token log-probabilities, weights and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def dequantized(gguf_path: Path, tensors: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """SHA-256 of the fp32 values that llama.cpp's own C code makes of blocks in a file.

    Args:
        gguf_path: the model file.
        tensors: of each `type` (GGML's name), `offset` and `nbytes` in the file, and the `count` of its values.

    Returns:
        The hashes in hexadecimal, and the engine's version.
    Raises:
        MissingCapabilityError: llama.cpp is not installed, or did not answer in time.
        ModelError: it has no such type.
    """
    answer = _asked(gguf_path, {"tensors": list(tensors)})
    return [str(h) for h in answer["sha256"]], str(answer["version"])


def tokenized(gguf_path: Path, texts: Sequence[str], conversations: Sequence[Sequence[Mapping[str, str]]] = ()) -> tuple[list[list[int]], list[str]]:
    """Token ids of texts, special tokens read as such and added as the file says, and conversations as the file's chat template renders them, up to the answer.

    Raises:
        MissingCapabilityError: llama.cpp is not installed, or did not answer in time.
        ModelError: it refuses the file or a conversation.
    """
    answer = _asked(gguf_path, {"texts": list(texts), "conversations": [list(map(dict, c)) for c in conversations], "context": 64, "exact": False})
    return answer["ids"], answer["rendered"]


def _asked(gguf_path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    python = interpreter()
    if python is None:
        raise MissingCapabilityError(str(missing()))
    return foreign.ask(python, _ADAPTER, request, engine=NAME, model=gguf_path, timeout_s=_BASE_S)[0]
