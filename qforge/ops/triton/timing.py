"""Time work on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD_BYTES = 256 << 20  # weights that together exceed every GPU's cache


def microseconds(calls: Sequence[Callable[[], Any]], rounds: int = 15) -> float:
    """Median time of one call by CUDA events, all of them captured one after the other in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return sorted(times[2:])[len(times[2:]) // 2]
