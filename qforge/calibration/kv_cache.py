"""Scales of a key/value cache in FP8: from the largest key and the largest value that each layer of the quantized model has over the calibration text.

Letters: B windows, T tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.replay import finished_block
from qforge.calibration.room import Room
from qforge.calibration.store import Piece
from qforge.errors import NumericalError, UnsupportedError
from qforge.models.blocks import BlockModel
from qforge.models.key_values import FP8, Pair, Passing
from qforge.progress import Progress
from qforge.scheme import ScaleType
from qforge.types import KvScales

BATCH_TOKENS = 4096


def measure(blocks: BlockModel, piece: Callable[[int], Piece], windows: torch.Tensor, room: Room, progress: Progress) -> KvScales:
    """Scales of keys (as they are stored: rotated, and after norms) and of values, by the name of the attention module; exact in bf16 and in fp16.

    Args:
        blocks: the model that was quantized.
        piece: what was made of a block, by index.
        windows: calibration token ids `[B, T]`.
        room: keeps what blocks take.
        progress: told of every block.

    Raises:
        UnsupportedError: a block stores no keys and values, or two kinds.
        NumericalError: they are not finite.
    """
    hidden = [room.keep(x) for x in blocks.embed(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))]
    scales: dict[str, tuple[float, float]] = {}
    for index in progress.track(range(blocks.num_blocks), "key/value scales", blocks.num_blocks):
        with finished_block(blocks, index, piece(index)) as module, _innermost(module) as active:
            seen: dict[str, list[torch.Tensor]] = {}

            def see(keys: torch.Tensor, values: torch.Tensor, seen: dict[str, list[torch.Tensor]] = seen, active: list[str] = active) -> Pair:
                seen.setdefault(active[-1], []).append(torch.stack([keys.abs().amax(), values.abs().amax()]).float())
                return keys, values

            for i, batch in enumerate(hidden):
                out = blocks.run(index, module, batch.load(), cache=Passing(see))
                batch.free()
                hidden[i] = room.keep(out)
        if len(seen) != 1:
            raise UnsupportedError(f"quantize.kv_cache: {blocks.block_names[index]} stores {'no' if not seen else 'several'} keys and values; use kv_cache: null")
        for name, largest in seen.items():
            key, value = torch.stack(largest).amax(0).tolist()
            scales[f"{blocks.block_names[index]}.{name}"] = _scale(key, f"keys of {blocks.block_names[index]}"), _scale(value, f"values of {blocks.block_names[index]}")
    for batch in hidden:
        batch.free()
    return scales


def _scale(largest: float, what: str) -> float:
    if not math.isfinite(largest):
        raise NumericalError(f"the {what} are not finite on the calibration text, so that no scale holds them; use kv_cache: null, or find out what is wrong with the model")
    return float(numerics.round_scale(numerics.activation_scale(torch.tensor(largest), FP8.number), ScaleType.F16BF16))


@contextlib.contextmanager
def _innermost(block: nn.Module) -> Iterator[list[str]]:
    """While open, names of the submodules that are being called, the innermost last."""
    active: list[str] = []
    handles = []
    for name, module in block.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: active.append(name)))
            handles.append(module.register_forward_hook(lambda *_: active.pop() and None))
    try:
        yield active
    finally:
        for handle in handles:
            handle.remove()
