"""What tunes a whole decoder block: the BlockTuner protocol, and what it is given.

Letters: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from qforge.methods.base import Options
from qforge.qlinear import QuantizedLinear


class Block(Protocol):
    """A decoder block whose linears have been quantized, one by one, and may be improved together."""

    @property
    def start(self) -> Mapping[str, QuantizedLinear]:
        """The linears by name, as they are now."""

    @property
    def parts(self) -> Sequence[object]:
        """Parts of the calibration text, each for one gradient."""

    def error(self, part: int, weights: Mapping[str, torch.Tensor]) -> float:
        """How far the block's outputs are from the unquantized model's, with these weights `[O, I]` fp32 in its linears and fed by the quantized model: a mean over tokens."""

    def gradients(self, part: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """That error's gradients by the weights, `[O, I]` fp32."""


class BlockTuner(Protocol):
    """One decoder block at a time, after a Quantizer of the same name has done its linears.

    Attributes:
        name: as a recipe writes it.
    """

    name: str

    def tune(self, block: Block, options: Options) -> dict[str, QuantizedLinear]:
        """Better codes and scales for the block's linears, schemes unchanged; those that are left out stay as they are."""
