"""Decode steps recorded once for each size of batch and replayed from then on, so that launching hundreds of kernels costs nothing.

A step of fewer sequences runs as one of the next recorded size. Rows that fill it up have token 0, a context of one token, and no slot: they write nothing,
and nothing reads what they give.
Letters: B rows of a recorded step, S sequences, M blocks of a sequence, V vocabulary.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from qforge.runtime.gpu_batch import GpuBatch
from qforge.runtime.step import StepInput

_STEP = 16  # between recorded sizes, after the powers of two up to it


class Recorded(Protocol):
    """What a capture returns."""

    def replay(self) -> None:
        """Do it all again, on the same memory."""


Capture = Callable[[Callable[[], None]], Recorded]


def cuda_capture() -> Capture:
    """Record into CUDA graphs that share one pool of memory, since no two of them run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Recorded:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles kernels, makes handles: none of which can be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph

    return capture


def sizes(most: int) -> tuple[int, ...]:
    """Recorded sizes up to `most`: 1, 2, 4, 8, 16, 32, 48, ... and `most` itself."""
    return tuple(sorted({n for n in (1, 2, 4, 8, *range(_STEP, most, _STEP)) if n < most} | {most}))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One recorded size: where its inputs go (`rows [4, B]` int64: tokens, positions, slots, lengths), and what computes its logits, which reads `starts`, too."""

    rows: torch.Tensor
    starts: torch.Tensor
    graph: Recorded


class DecodeGraphs:
    """Recorded steps that share their inputs and their logits.

    Args:
        forward: a step, batch -> logits `[B, V]` fp32, that neither waits for the device nor looks at its values.
        device: where its tensors are.
        most: the most sequences.
        blocks: M.
        longest_context: tokens; kernels are launched for contexts of up to so many.

    Attributes:
        sizes: recorded ones, rising.
        seconds: that recording took.
    """

    def __init__(self, forward: Callable[[GpuBatch], torch.Tensor], device: torch.device, most: int, blocks: int, longest_context: int, vocabulary: int, capture: Capture) -> None:
        start = time.perf_counter()
        self.sizes = sizes(most)
        self._inputs = torch.zeros(4 * most, dtype=torch.int64, device=device)
        self._tables = torch.zeros((most, blocks), dtype=torch.int32, device=device)
        self._logits = torch.zeros((most, vocabulary), device=device)
        self._steps: dict[int, _Step] = {}
        for size in reversed(self.sizes):  # the largest first: what it takes is enough for all
            rows = self._inputs[: 4 * size].view(4, size)
            rows.copy_(torch.from_numpy(_padded(size, [])))
            starts = torch.arange(size + 1, dtype=torch.int32, device=device)
            self._steps[size] = _Step(rows, starts, capture(self._step(forward, rows, starts, longest_context)))
        self.seconds = time.perf_counter() - start

    def logits(self, step: StepInput) -> torch.Tensor | None:
        """fp32 logits `[S, V]`, valid until the next call; None for a step that is none of decoding, or too large."""
        count = len(step.context_lens)
        if not len(step.tokens) == len(step.logit_indices) == count <= self.sizes[-1]:
            return None
        recorded = self._steps[next(n for n in self.sizes if n >= count)]
        values = [step.tokens, step.positions, step.slot_mapping, step.context_lens]
        recorded.rows.copy_(torch.from_numpy(_padded(recorded.rows.shape[1], values)))
        tables = torch.from_numpy(np.asarray(step.block_tables)).view(count, -1)
        self._tables[:count, : tables.shape[1]].copy_(tables)
        recorded.graph.replay()
        return self._logits[:count]

    def _step(self, forward: Callable[[GpuBatch], torch.Tensor], rows: torch.Tensor, starts: torch.Tensor, longest_context: int) -> Callable[[], None]:
        size = rows.shape[1]
        tables, logits = self._tables[:size], self._logits[:size]

        def run() -> None:
            batch = GpuBatch(rows[0], rows[1].int(), rows[2], tables, starts, rows[3].int(), None, 1, longest_context)
            logits.copy_(forward(batch))

        return run


def _padded(size: int, values: list[array[int]]) -> np.ndarray:
    """`[4, B]` int64: the rows of a step, then rows that write nothing."""
    rows = np.empty((4, size), np.int64)
    rows[:] = np.array([0, 0, -1, 1])[:, None]
    for row, value in zip(rows, values, strict=False):
        row[: len(value)] = value
    return rows
