"""Learned rounding (SignRound, Cheng et al., arXiv 2309.05516): codes and scales of a block's linears, moved together by the signs of gradients of the block's output error.

A code is the nearest integer to a position that is learned; gradients pass through the rounding as if it were not there. Here the positions begin where GPTQ's codes are, each
as near to its weight as its code allows, so that those codes that the error feedback moved are the first to move again; no code moves by more than one.
Steps shrink linearly to nothing, so that a position travels half a code at most.

Letters: O output features, I input features, C groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qforge import numerics
from qforge.methods import refine
from qforge.methods.base import Options
from qforge.methods.gptq import GPTQ
from qforge.methods.tuning import Block
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme

HALF = 0.499  # of a code: a position this far from it still rounds to it
START = 1.0
RATE = 1.0
SCALE_RATE = 0.1  # steps of scales, relative to those of positions
SCALE_RANGE = 0.25  # how far a scale may move, relative to itself
HELD_OUT = 8  # one part of so many of the batches is not learned from, and decides which step was the best
CHECKS = 10  # how many times that is asked


class SignRound(GPTQ):
    """GPTQ, and then every block's linears together."""

    name = "signround"

    def needs(self, options: Options) -> frozenset[str]:
        """What GPTQ needs, and what the unquantized model's blocks put out."""
        return super().needs(options) | {"targets"}

    def supports(self, scheme: Scheme) -> str | None:
        """Integers on a grid."""
        if not refine.applies(scheme):
            return "learned rounding is for integers with one scale for each output channel or group; use method: gptq"
        return super().supports(scheme)

    def tune(self, block: Block, options: Options) -> dict[str, QuantizedLinear]:
        """See `BlockTuner.tune`."""
        learned = {name: _Learned.of(q, block.targets[name]) for name, q in block.start.items()}
        generator = torch.Generator().manual_seed(0)
        count = len(block.parts)
        last = count - count // HELD_OUT
        order: list[int] = []
        best, found = float("inf"), dict(block.start)
        every = max(1, options.steps // CHECKS)
        for step in range(options.steps + 1):
            if step % every == 0 or step == options.steps:
                weights = {name: x.weight() for name, x in learned.items()}
                error = sum(block.error(i, weights) for i in range(last if last < count else 0, count))
                if error < best:
                    best, found = error, {name: x.quantized() for name, x in learned.items()}
            if step < options.steps:
                order = order or torch.randperm(last, generator=generator).tolist()
                rate = RATE / options.steps * (1 - step / options.steps)
                for name, gradient in block.gradients(order.pop(), {name: x.weight() for name, x in learned.items()}).items():
                    learned[name].move(gradient, rate)
        return found


@dataclass(frozen=True, slots=True)
class _Learned:
    """What is learned of one linear.

    Attributes:
        start: where it began.
        positions: `[O, I]` fp32; their nearest integers are the codes.
        factors: `[O, C]` fp32, what the scales are multiplied by.
    """

    start: QuantizedLinear
    positions: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, q: QuantizedLinear, target: torch.Tensor) -> _Learned:
        """Where learning begins."""
        codes = q.codes.float()
        away = target / _spread(q.scales, q) + (0 if q.zeros is None else _spread(q.zeros, q).float()) - codes
        return cls(q, codes.add_(away.clamp_(-HALF, HALF), alpha=START), torch.ones_like(q.scales))

    def quantized(self) -> QuantizedLinear:
        """As it is now."""
        codes = self.positions.round().clamp_(*self.start.scheme.code_range).to(self.start.codes.dtype)
        return replace(self.start, codes=codes, scales=self._scales())

    def _scales(self) -> torch.Tensor:
        return numerics.round_scale(self.start.scales * self.factors, self.start.scheme.scale.type)

    def weight(self) -> torch.Tensor:
        """`[O, I]` fp32, as it is now."""
        return numerics.dequantize(self.quantized())

    def move(self, gradient: torch.Tensor, rate: float) -> None:
        """One step against the gradient by the weight `[O, I]`, in place."""
        q = self.quantized()
        steps = q.codes.float() - (0 if q.zeros is None else _spread(q.zeros, q).float())
        by_scale = (gradient * steps).view(*q.scales.shape, -1).sum(-1)
        self.factors.sub_(by_scale.sign(), alpha=rate * SCALE_RATE).clamp_(1 - SCALE_RANGE, 1 + SCALE_RANGE)
        self.positions.sub_(gradient.sign(), alpha=rate)


def _spread(values: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    return numerics.expand(values, q.scheme, q.out_features, q.in_features)
