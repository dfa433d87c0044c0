"""Mean squares of what every linear is fed, over the calibration text: llama.cpp's importance matrix, and the weights under which K-quants are searched.

Letters: B windows, T tokens, D hidden width, I input features.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from qforge.calibration.precision import fast_products
from qforge.calibration.room import Room
from qforge.calibration.streams import BATCH_TOKENS
from qforge.errors import NumericalError
from qforge.models.blocks import BlockModel
from qforge.progress import Progress


def square_sums(blocks: BlockModel, windows: torch.Tensor, room: Room, progress: Progress) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Sums of squared inputs over all tokens, fp32 `[I]`, of every linear and of the output head by module name, and over how many tokens; a linear that no token reaches is
    left out.

    Args:
        blocks: the model; one block of it is in memory at a time.
        windows: calibration token ids `[B, T]`.
        room: keeps hidden states.
        progress: told of every block.

    Raises:
        NumericalError: an activation is NaN or infinite.
    """
    hidden = [room.keep(h) for h in blocks.embed(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))]
    found = _Sums({}, Counter())
    for index in progress.track(range(blocks.num_blocks), "importance", blocks.num_blocks):
        with blocks.block(index) as module, fast_products(module), _added(blocks.linears(index), found):
            for i, kept in enumerate(hidden):
                out = blocks.run(index, module, kept.load())
                kept.free()
                hidden[i] = room.keep(out)
    if blocks.head_name is not None:
        for x in blocks.head_inputs(h.load() for h in hidden):
            found.add(blocks.head_name, x)
    for name, total in found.sums.items():
        if not total.isfinite().all():
            raise NumericalError(f"{name}: an activation is NaN or infinite")
    return found.sums, dict(found.tokens)


class _Sums(NamedTuple):
    sums: dict[str, torch.Tensor]
    tokens: Counter[str]

    def add(self, name: str, x: torch.Tensor) -> None:
        rows = x.flatten(0, -2)
        total = rows.float().square().sum(0)
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.tokens[name] += len(rows)


@contextlib.contextmanager
def _added(linears: Mapping[str, nn.Linear], found: _Sums) -> Iterator[None]:
    """While open, what linears are fed is added up."""
    hooks = [linear.register_forward_pre_hook(lambda module, args, name=name: found.add(name, args[0])) for name, linear in linears.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
