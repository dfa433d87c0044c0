"""Scores token windows on the built-in runtime."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qforge import __version__
from qforge.models.model import Model
from qforge.runtime.llm import LLM
from qforge.runtime.sequence import SamplingParams

SCORING_BLOCK = 16
WRITING = 8  # continuations written at once
WRITTEN_BLOCKS = 8  # of the cache, for each of them


class RuntimeEngine:
    """A `Scorer` over `LLM`: weights stay as packed as they are stored.

    Raises:
        UnsupportedError: the model's family, or the kind of activations, is not available on the runtime.
    """

    version = __version__

    def __init__(self, model: Model, *, threads: int | None = None, activations: str = "fp", device: str = "cpu", tensor_parallel: int = 1) -> None:
        context = 1 if model.spec is None else model.spec.max_positions
        blocks = max(-(-context // SCORING_BLOCK), WRITING * WRITTEN_BLOCKS) if device == "cpu" else None  # a GPU takes memory at once: as much of this as there is room for
        self._llm = LLM(
            model, activations=activations, threads=threads, device=device, tensor_parallel=tensor_parallel, graphs=False,
            block_size=SCORING_BLOCK, num_blocks=blocks, max_num_seqs=WRITING, prefix_cache=False,
        )  # fmt: skip
        said = [f"{activations} activations"] * (activations != "fp") + ["fp8 keys and values"] * (self._llm.kv_cache == "fp8") + [f"on {device}"] * (device != "cpu")
        self.name = f"qforge ({', '.join(said)})" if said else "qforge"

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        return self._llm.score(windows)

    def write(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations of `count` tokens, end tokens or not; of fewer where the model's context ends, none where a prompt fills it."""
        room = min(count, self._llm.max_context - max(map(len, prompts)))
        if room < 1:
            return []
        return [o.token_ids for o in self._llm.generate(prompts, SamplingParams(max_tokens=room, ignore_eos=True))]
