"""Scales of all linears tuned together, codes as they are: by gradients of the KL divergence of the original's predictions from the quantized model's, over the calibration text.
Where a scheme rounds activations, the model that is tuned does.

The second phase of EfficientQAT (Chen et al., arXiv 2407.11062), with the original's distribution in the place of the text's next tokens. Scales are few: what they learn holds on
other text, where codes that move together overfit or scatter (docs/log.md).

Letters: B windows, T tokens, D hidden width, O output features, I input features, C groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.gradients import CHUNK, Logits, head, straight_through
from qforge.calibration.precision import fast_products
from qforge.calibration.room import Kept, Room
from qforge.methods import refine
from qforge.models.blocks import BlockModel
from qforge.progress import Progress
from qforge.qlinear import QuantizedLinear

STEP_TOKENS = 2048  # of one step
RATE = 1.5e-3  # of a scale, relative to itself, at the first step; it falls to 0 along a cosine. stories15M, int4 group 32, 60 steps: 1e-3 .0258, 1.5e-3 .0257, 4e-3 .0275
FEW = 512  # so many more or fewer are left out together: logits of a few sizes take each other's place in memory
MOMENTS = (0.9, 0.99)
LIKELY = 1e-3  # as likely as that, in comparison with the likeliest token, at one of `CHUNK` positions: tokens that are not are left out of the divergence there


@dataclass(slots=True)
class _Tuned:
    """One linear, and what is learned of it.

    Attributes:
        module: of the quantized model.
        start: as it was rounded.
        factors: `[O, C]` fp32, logarithms of what its scales are multiplied by.
        mean, square: of the gradients so far.
    """

    module: nn.Linear
    start: QuantizedLinear
    factors: torch.Tensor
    mean: torch.Tensor = field(init=False)
    square: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean, self.square = torch.zeros_like(self.factors), torch.zeros_like(self.factors)

    def now(self) -> QuantizedLinear:
        """With the scales that it has by now, as they are stored."""
        return replace(self.start, scales=numerics.round_scale(self.start.scales * self.factors.exp(), self.start.scheme.scale.type))

    def put(self) -> None:
        """Put these weights into the module."""
        self.module.weight = nn.Parameter(numerics.dequantize(self.now()))

    def move(self, step: int, rate: float) -> None:
        """One step of Adam (arXiv 1412.6980) along the weight's gradient."""
        if self.module.weight.grad is None:  # an expert that no token of the step was given to
            return
        weight = self.module.weight.detach()
        gradient = (self.module.weight.grad * weight).view(*self.factors.shape, -1).sum(-1)  # by the scale's logarithm
        first, second = MOMENTS
        self.mean.lerp_(gradient, 1 - first)
        self.square.lerp_(gradient.square(), 1 - second)
        self.factors.sub_(rate * (self.mean / (1 - first**step)) / ((self.square / (1 - second**step)).sqrt() + 1e-20))
        self.put()


def tune(
    blocks: BlockModel, linears: Mapping[str, QuantizedLinear], changed: Mapping[str, torch.Tensor], windows: torch.Tensor, steps: int, room: Room, progress: Progress
) -> dict[str, torch.Tensor]:
    """Scales `[O, C]` of linears, by name.

    Args:
        blocks: the original.
        linears: of its blocks, quantized.
        changed: tensors beside them that transforms changed, by name.
        windows: calibration token ids `[B, T]`.
        steps: of gradient descent, each over `STEP_TOKENS` tokens.
        room: keeps what is computed once: of every batch what the first block takes, and what the original's last one gives.
        progress: told of every step, and of what came out.
    """
    batches = windows.split(max(1, STEP_TOKENS // windows.shape[1]))
    inputs = [room.keep(h) for h in blocks.embed(batches)]
    wanted = _last(blocks, inputs, room, progress)
    with _student(blocks, linears, changed) as (modules, tuned), head(blocks) as logits:
        generator = torch.Generator().manual_seed(0)
        order: list[int] = []
        seen: list[float] = []
        likely: dict[int, list[torch.Tensor]] = {}
        for step in progress.track(range(1, steps + 1), "tune", steps):
            order = order or torch.randperm(len(batches), generator=generator, device="cpu").tolist()
            batch = order.pop()
            target = wanted[batch].load()
            if batch not in likely:
                likely[batch] = _likely(logits, target)
            seen.append(_divergence(blocks, modules, logits, inputs[batch].load(), target, likely[batch]))
            for linear in tuned.values():
                linear.move(step, RATE * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
        some = max(1, steps // 10)
        progress.note(f"tune: KL divergence on the calibration text {sum(seen[:some]) / some:.4f} in the first steps, {sum(seen[-some:]) / some:.4f} in the last")
        return {name: linear.now().scales for name, linear in tuned.items()}


def _last(blocks: BlockModel, inputs: Sequence[Kept], room: Room, progress: Progress) -> list[Kept]:
    """What the original's last block gives, `[B, T, D]` fp32, by batch."""
    hidden = list(inputs)
    for index in progress.track(range(blocks.num_blocks), "run", blocks.num_blocks):
        with blocks.block(index) as module, fast_products(module):
            for i, x in enumerate(hidden):
                out = blocks.run(index, module, x.load())
                if index > 0:
                    x.free()
                hidden[i] = room.keep(out)
    return hidden


@contextlib.contextmanager
def _student(
    blocks: BlockModel, linears: Mapping[str, QuantizedLinear], changed: Mapping[str, torch.Tensor]
) -> Iterator[tuple[list[nn.Module], dict[str, _Tuned]]]:  # fmt: skip
    """The quantized model's blocks, all of them in memory, and their linears that can be tuned."""

    def stored(name: str) -> torch.Tensor | None:
        linear = linears.get(name.removesuffix(".weight"))
        return changed.get(name) if linear is None else numerics.dequantize(linear)

    with contextlib.ExitStack() as stack:
        modules, tuned = [], {}
        for index in range(blocks.num_blocks):
            modules.append(stack.enter_context(blocks.block(index, stored, lambda name: None)))
            stack.enter_context(fast_products(modules[-1]))
            for name, module in blocks.linears(index).items():
                q = linears.get(name)
                if q is not None and refine.applies(q.scheme) and q.group_index is None:
                    tuned[name] = _Tuned(module, q, torch.zeros_like(q.scales, dtype=torch.float32))
                    tuned[name].put()
                rounding = None if q is None else numerics.input_rounding(q.scheme, q.input_scale)
                if rounding is not None:
                    stack.callback(module.register_forward_pre_hook(straight_through(rounding)).remove)
        yield modules, tuned


def _likely(logits: Logits, wanted: torch.Tensor) -> list[torch.Tensor]:
    """Of every `CHUNK` positions, ids of the tokens that are likely at one of them."""
    found = []
    for y in wanted.flatten(0, 1).split(CHUNK):
        all_logits = logits(y).detach()
        best = all_logits.sub_(all_logits.amax(1, keepdim=True)).amax(0)
        count = int((best >= math.log(LIKELY)).sum())
        found.append(best.topk(min(len(best), -(-count // FEW) * FEW)).indices)
    return found


def _divergence(
    blocks: BlockModel, modules: Sequence[nn.Module], logits: Logits, hidden: torch.Tensor, wanted: torch.Tensor, likely: Sequence[torch.Tensor]
) -> float:  # fmt: skip
    """KL divergence in nats a token, among likely tokens; the weights' gradients are left in the modules.

    Args:
        blocks: gives the calls.
        modules: of the quantized model.
        logits: of hidden states `[N, D]`, of both models.
        hidden: what the first block takes, `[B, T, D]`.
        wanted: what the original's last block gives, `[B, T, D]`.
        likely: token ids, of every `CHUNK` positions.
    """
    for index, module in enumerate(modules):
        hidden = blocks.run(index, module, hidden, gradients=True)
    positions = hidden.detach().flatten(0, 1)
    slopes, total = torch.empty_like(positions), 0.0
    for x, y, tokens, slope in zip(positions.split(CHUNK), wanted.flatten(0, 1).split(CHUNK), likely, slopes.split(CHUNK), strict=True):
        x.requires_grad_()
        found, target = logits(x, tokens), logits(y, tokens).detach().log_softmax(-1)
        log_p = found.detach().log_softmax(-1)
        p = target.exp()
        total += float(torch.linalg.vecdot(p, target - log_p).sum()) / len(positions)
        slope.copy_(torch.autograd.grad(found, x, log_p.exp_().sub_(p).div_(len(positions)))[0])
    hidden.backward(slopes.view_as(hidden))
    return total
