"""Learned rounding: codes and scales of a block's linears moved together along gradients of the block's output error, as SignRound does (Cheng et al., arXiv 2309.05516).

A code is the nearest integer to a position that is learned; gradients pass through the rounding as if it were not there. SignRound starts from weights rounded to nearest
and takes signs of gradients. Here positions start at GPTQ's codes, which a step of every position at once would destroy: sizes count, relative to those of the same input,
averaged over steps, so that a code moves where the text keeps asking for it. What was not learned from decides which step is kept, the start among them.

stories15M, int4 group 32, block error on the part that was not learned from, relative to GPTQ's (which has seen that part): signs, positions as near to their weights as GPTQ's
codes allow, 1.08 to 1.31 after 200 steps; this .984 to .999. docs/log.md says what that does to the model.

Letters: O output features, I input features, C groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qforge import numerics
from qforge.methods import coupled
from qforge.methods.base import Options
from qforge.methods.gptq import GPTQ
from qforge.methods.tuning import Block
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme

RATE = 0.5  # codes that a position with gradients of typical size travels in twice all steps; they shrink linearly. Too little moves no code, 1 moves too many at once
LARGEST = 3.0  # of a gradient, relative to those of the same input
MOMENTUM = 0.9
SCALE_RATE = 0.1  # steps of scales relative to themselves, as a part of those of positions
HELD_OUT = 8  # one part of so many of the calibration text is not learned from
CHECKS = 10  # how many times the error there is measured


class SignRound(GPTQ):
    """GPTQ, and then every block's linears together."""

    name = "signround"

    def needs(self, options: Options) -> frozenset[str]:
        """What GPTQ needs, and what the unquantized model's blocks put out."""
        return super().needs(options) | {"targets"}

    def supports(self, scheme: Scheme) -> str | None:
        """Integers on a grid."""
        if not coupled.applies(scheme):
            return "learned rounding is for integers with one scale for each output channel or group; use method: gptq"
        return super().supports(scheme)

    def tune(self, block: Block, options: Options) -> dict[str, QuantizedLinear]:
        """See `BlockTuner.tune`."""
        learned = {name: _Learned.of(q) for name, q in block.start.items()}
        count = len(block.parts)
        last = count - count // HELD_OUT
        judges = range(last, count) if last < count else range(count)
        generator = torch.Generator().manual_seed(0)
        order: list[int] = []
        best, found = float("inf"), dict(block.start)
        every = max(1, options.steps // CHECKS)
        for step in range(options.steps + 1):
            weights = {name: x.weight() for name, x in learned.items()}
            if step % every == 0 or step == options.steps:
                error = sum(block.error(part, weights) for part in judges)
                if error < best:
                    best, found = error, {name: x.quantized() for name, x in learned.items()}
            if step < options.steps:
                order = order or torch.randperm(last, generator=generator, device="cpu").tolist()
                for name, gradient in block.gradients(order.pop(), weights).items():
                    learned[name].move(gradient, RATE / options.steps * (1 - step / options.steps))
        return found


@dataclass(frozen=True, slots=True)
class _Learned:
    """What is learned of one linear.

    Attributes:
        start: where it began.
        positions: `[O, I]` fp32; their nearest integers are the codes.
        mean: `[O, I]` fp32, of the gradients so far, newer ones counting more.
        factors: `[O, C]` fp32, what the scales are multiplied by.
    """

    start: QuantizedLinear
    positions: torch.Tensor
    mean: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, q: QuantizedLinear) -> _Learned:
        """Where learning begins."""
        codes = q.codes.float()
        return cls(q, codes, torch.zeros_like(codes), torch.ones_like(q.scales))

    def quantized(self) -> QuantizedLinear:
        """As it is now: codes at most one from where they began."""
        before, (low, high) = self.start.codes.float(), self.start.scheme.code_range
        codes = self.positions.round().clamp_(low, high)
        codes = torch.minimum(torch.maximum(codes, before - 1), before + 1)
        scales = numerics.round_scale(self.start.scales * self.factors, self.start.scheme.scale.type)
        return replace(self.start, codes=codes.to(self.start.codes.dtype), scales=scales)

    def weight(self) -> torch.Tensor:
        """`[O, I]` fp32, as it is now."""
        return numerics.dequantize(self.quantized())

    def move(self, gradient: torch.Tensor, rate: float) -> None:
        """One step against the gradient by the weight `[O, I]`, in place."""
        q = self.quantized()
        zeros = 0 if q.zeros is None else numerics.expand(q.zeros, q.scheme, q.out_features, q.in_features).float()
        by_scale = (gradient * (q.codes.float() - zeros)).view(*q.scales.shape, -1).sum(-1)
        self.factors.sub_(by_scale.sign(), alpha=rate * SCALE_RATE)
        self.mean.lerp_(gradient, 1 - MOMENTUM)
        typical = self.mean.square().mean(0).sqrt().clamp(min=1e-30)
        self.positions.sub_((self.mean / typical).clamp_(-LARGEST, LARGEST), alpha=rate)
