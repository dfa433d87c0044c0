"""The unquantized model beside the quantized one: what its block feeds each linear and has in the residual stream, kept until the quantized stream arrives there.

Letters: B windows, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from qforge.calibration.lockstep import Run
from qforge.calibration.room import Kept, Room
from qforge.calibration.transforms import Folds
from qforge.models.experts import routed_rows


class Originals:
    """What the unquantized block feeds its linears, in half precision and as the folds will have it; making one brings the original stream behind the block.

    Args:
        room: keeps them.
        run: the unquantized block, `[B, T, D] -> [B, T, D]`.
        linears: by name.
        taps: submodules that take the residual stream, by name.
        stream: its inputs, batch by batch; becomes its outputs.
        folds: what inputs will be divided by.
    """

    def __init__(self, room: Room, run: Run, linears: Mapping[str, nn.Linear], taps: Mapping[str, nn.Module], stream: list[Kept], folds: Folds) -> None:
        self._kept: dict[tuple[str, int], tuple[Kept, torch.Tensor | None]] = {}
        for i, batch in enumerate(stream):
            last: list[torch.Tensor] = []

            def gather(name: str, x: torch.Tensor, i: int = i, last: list[torch.Tensor] = last) -> None:
                if not last or last[0] is not x:  # linears that share an input are asked for it once
                    last[:] = [x]
                    self._kept[name, i] = room.copy(x / folds.inputs[name] if name in folds.inputs else x), routed_rows()

            def tap(name: str, x: torch.Tensor, i: int = i) -> None:
                self._kept[name, i] = room.copy(x), None

            handles = [m.register_forward_pre_hook(lambda _, args, n=n, gather=gather: gather(n, args[0])) for n, m in linears.items()]
            handles += [m.register_forward_pre_hook(lambda _, args, n=n, tap=tap: tap(n, args[0])) for n, m in taps.items()]
            try:
                out = run(batch.load())
            finally:
                for handle in handles:
                    handle.remove()
            batch.free()
            stream[i] = room.keep(out)

    def take(self, name: str, batch: int, x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor | None:
        """What stands in the place of `x`, the quantized stream's input of a linear in a batch; None where the unquantized model does not run it there. Given away.

        An expert is given other tokens (`rows`) in the two streams, since they are routed by what they have become. A token that only the quantized
        stream sends there has nothing to be compared with: it counts as being right.
        """
        kept, original_rows = self._kept.pop((name, batch), (None, None))
        if kept is None:
            return None
        found = kept.load()
        kept.free()
        if rows is None or original_rows is None:
            return found
        places = torch.searchsorted(original_rows, rows).clamp(max=len(original_rows) - 1)
        both = original_rows[places] == rows
        right = x.to(found.dtype)
        if right.isinf().any():  # larger than what the unquantized model has
            found, right = found.bfloat16(), x.bfloat16()
        return torch.where(both[:, None], found[places], right)
