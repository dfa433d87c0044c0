"""Scores windows with transformers' own modelling code in fp32, one decoder block in memory at a time.

All windows pass through block 0, then all through block 1, and so on; what is kept between blocks are the hidden states. The hidden states
after the last block are a lossless, small form of the logits (the head is applied chunk by chunk), so they are also what a cached
reference consists of.

Letters: D hidden width, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from qforge.engines.base import chunks
from qforge.models.blocks import BlockModel
from qforge.models.model import Model

BATCH_TOKENS = 4096


class TransformersEngine:
    """A Scorer over a model's (dequantized) weights and transformers' modelling code."""

    def __init__(self, model: Model) -> None:
        import transformers

        self.name = "transformers (fp8 keys and values)" if model.kv_scales else "transformers"
        self.version: str = transformers.__version__
        self._blocks = BlockModel(model)

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        kept = self._states(windows)
        with self._blocks.head() as logits:
            for states in kept:
                for start, stop in chunks(states.shape[0]):
                    yield logits(states[start:stop])

    def _states(self, windows: list[list[int]]) -> Iterable[torch.Tensor]:
        return self.hidden(windows)

    def hidden(self, windows: list[list[int]], done: Callable[[int], None] = lambda block: None) -> list[torch.Tensor]:
        """Hidden states `[T, D]` fp32 after the last block, one tensor a window; `done` is told of every finished block."""
        states = list(self._blocks.embed(torch.tensor(batch) for batch in _batches(windows)))
        for index in range(self._blocks.num_blocks):
            with self._blocks.block(index) as module:
                for i, batch in enumerate(states):
                    states[i] = self._blocks.run(index, module, batch)
            done(index)
        return [window for batch in states for window in batch]


def _batches(windows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Neighbouring windows of equal length, up to BATCH_TOKENS tokens together."""
    batch: list[list[int]] = []
    for window in windows:
        if batch and (len(window) != len(batch[0]) or (len(batch) + 1) * len(window) > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
