"""A finished block as the quantized model has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.precision import fast_products
from qforge.calibration.store import Piece
from qforge.models.blocks import BlockModel


@contextlib.contextmanager
def finished_block(blocks: BlockModel, index: int, piece: Piece) -> Iterator[nn.Module]:
    """Open a block with what was made of it: quantized weights, tensors that transforms changed, rounded inputs."""
    linears = {name: q.to(torch.get_default_device()) for name, q in piece.linears.items()}

    def stored(tensor_name: str) -> torch.Tensor | None:
        q = linears.get(tensor_name.removesuffix(".weight")) if tensor_name.endswith(".weight") else None
        return piece.tensors.get(tensor_name) if q is None else numerics.dequantize(q)

    def rounding(name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        q = linears.get(name)
        return None if q is None else numerics.input_rounding(q.scheme, q.input_scale)

    with blocks.block(index, stored, rounding) as module, fast_products(module):
        yield module
