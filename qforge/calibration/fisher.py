"""How a linear's outputs weigh against each other: the mean of g g^T over some tokens, g the gradient of log p(y) by the outputs, y drawn from the model's own predictions.

The output-side Kronecker factor of the model's Fisher information (KFAC, Martens & Grosse, arXiv 1503.05671); the input-side one is the Hessian of GPTQ.

Letters: B windows, T tokens, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from qforge.calibration.gradients import backwards, forwards
from qforge.calibration.room import Room
from qforge.models.blocks import BlockModel
from qforge.progress import Progress

TOKENS = 16384  # at most; see `gather`
BATCH_TOKENS = 2048
Outputs = dict[str, torch.Tensor]


def gather(blocks: BlockModel, names: Collection[str], windows: torch.Tensor, room: Room, save: Callable[[int, Outputs], None], progress: Progress) -> None:
    """Measure it for the linears of all blocks, in the unquantized model.

    Args:
        blocks: the merged model.
        names: of linears, and of blocks (`BlockModel.block_names`), whose outputs are those of their last layer and what passes by it.
        windows: calibration token ids `[B, T]`, of which the first `TOKENS` are taken. KL on stories15M (3, 10 sweeps): 4,096 tokens .0310, .0314; 16,384 .0312, .0293.
        room: keeps what blocks take.
        save: given a block's index and, by name, `[O, O]` in half precision with a mean diagonal of 1 (missing where no gradient came to be, zero where all were).
        progress: told of every block, twice.
    """
    wanted = frozenset(names)
    batches = windows[: max(1, TOKENS // windows.shape[1])].split(max(1, BATCH_TOKENS // windows.shape[1]))
    kept, last = forwards(blocks, room, batches, progress)
    sums: Outputs = {}

    def add(name: str, gradient: torch.Tensor) -> None:
        if name in wanted and name != blocks.head_name:
            rows = gradient.reshape(-1, gradient.shape[-1])
            sums[name] = torch.addmm(sums[name], rows.T, rows) if name in sums else rows.T @ rows

    for index in backwards(blocks, kept, last, add, progress):
        save(index, {name: _normalized(total) for name, total in sums.items()})
        sums.clear()


def _normalized(total: torch.Tensor) -> torch.Tensor:
    mean = total.diagonal().double().mean()
    return (total / mean if mean > 0 else total).half()
