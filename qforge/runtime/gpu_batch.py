"""The tokens of a step as a GPU's kernels take them.

Letters: T tokens, S sequences, L rows whose logits are wanted, M blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qforge.runtime.step import StepInput


@dataclass(frozen=True, slots=True, eq=False)
class GpuBatch:
    """Tensors on the device, and what is known of them on the host, so that nothing waits for the GPU.

    Attributes:
        tokens: `[T]` int64.
        positions: `[T]` int32.
        slots: `[T]` int64; -1 for a row that writes nothing.
        tables: `[S, M]` int32.
        starts: `[S + 1]` int32.
        lengths: `[S]` int32.
        wanted: `[L]` int64; None: every row.
        longest: the most tokens of a sequence in this step; longest_context: the most that one has in the cache.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    wanted: torch.Tensor | None
    longest: int
    longest_context: int


def moved(step: StepInput, device: torch.device) -> GpuBatch:
    """A step on the device."""
    rows = torch.from_numpy(np.stack((step.tokens, step.positions, step.slot_mapping))).to(device)
    starts, tables = (torch.from_numpy(np.asarray(a)).to(device) for a in (step.query_starts, step.block_tables))
    lengths = torch.from_numpy(np.asarray(step.context_lens, np.int32)).to(device)
    wanted = None if len(step.logit_indices) == len(step.tokens) else torch.from_numpy(np.asarray(step.logit_indices)).to(device)
    longest, context = int(np.diff(step.query_starts).max()), max(step.context_lens)
    return GpuBatch(rows[0], rows[1].int(), rows[2], tables.view(len(step.context_lens), -1), starts, lengths, wanted, longest, context)
