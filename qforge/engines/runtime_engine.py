"""Scores token windows on the built-in runtime."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qforge import __version__
from qforge.models.model import Model
from qforge.runtime.decoder import supports
from qforge.runtime.llm import LLM

SCORING_BLOCK = 16


class RuntimeEngine:
    """A `Scorer` over `LLM`: weights stay as packed as they are stored.

    Raises:
        UnsupportedError: the model's family, or the kind of activations, is not available on the runtime.
    """

    version = __version__

    def __init__(self, model: Model, *, threads: int | None = None, activations: str = "fp") -> None:
        self.name = "qforge" if activations == "fp" else f"qforge ({activations} activations)"
        context = 1 if model.spec is None else model.spec.max_positions
        self._llm = LLM(model, activations=activations, threads=threads, block_size=SCORING_BLOCK, num_blocks=-(-context // SCORING_BLOCK))

    @staticmethod
    def supports(model: Model) -> str | None:
        """None if the runtime runs this model; otherwise the reason why not. Reads no weights."""
        return supports(model.spec)

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        return self._llm.score(windows)
