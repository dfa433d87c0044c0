"""llama.cpp as a foreign engine: runs a GGUF file in a process of its own, through the prebuilt xllamacpp wheel, and gives logits of whole texts, weights and token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qforge.engines import foreign
from qforge.engines.base import CHUNK, chunks
from qforge.errors import MissingCapabilityError

NAME = "llama.cpp"
PACKAGE = "xllamacpp"
_ADAPTER = Path(__file__).with_name("llama_cpp_adapter.py")
_SCORER = Path(__file__).with_name("llama_cpp_scorer.py")
_TIMEOUT_S = 120.0


def interpreter() -> Path | None:
    """The Python that has xllamacpp: this one, or the one that `make engines` made; None if neither has it."""
    return foreign.interpreter(PACKAGE, "llamacpp")


def missing() -> str | None:
    """Why llama.cpp cannot run here, and what to do; None if it can."""
    return None if interpreter() is not None else f"llama.cpp is not installed here: pip install 'qforge[llamacpp]' (the package {PACKAGE}, prebuilt)"


class LlamaCppEngine:
    """A `Scorer` over a GGUF file, with an fp32 cache and without flash attention.

    Raises:
        MissingCapabilityError: llama.cpp is not installed.
    """

    name = NAME

    def __init__(self, gguf_path: Path, *, threads: int | None = None) -> None:
        python = interpreter()
        if python is None:
            raise MissingCapabilityError(str(missing()))
        self._python, self._path, self._threads = python, gguf_path, threads
        self.version = foreign.version_of(python, PACKAGE)

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`. The engine's process is a chunk ahead and no more.

        Raises:
            ModelError: llama.cpp refuses the file, or ends before all windows are scored.
        """
        request = {"windows": windows, "chunk": CHUNK, **({} if self._threads is None else {"threads": self._threads})}
        with foreign.stream(self._python, _SCORER, request, engine=NAME, model=self._path) as (answer, read):
            vocab_size = int(answer["vocab_size"])
            for window in windows:
                for start, stop in chunks(len(window)):
                    yield torch.from_numpy(read((stop - start) * vocab_size)).view(stop - start, vocab_size)


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
    answer = _asked(gguf_path, {"texts": list(texts), "conversations": [list(map(dict, c)) for c in conversations], "context": 64})
    return answer["ids"], answer["rendered"]


def _asked(gguf_path: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    python = interpreter()
    if python is None:
        raise MissingCapabilityError(str(missing()))
    return foreign.ask(python, _ADAPTER, request, engine=NAME, model=gguf_path, timeout_s=_TIMEOUT_S)[0]
