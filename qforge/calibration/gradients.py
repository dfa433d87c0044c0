"""Gradients of log p(y) by what linears put out, y drawn from the model's own predictions: one pass forward, one back, block by block.

Going back, each block is run once more from its kept inputs, so that one block at a time is in memory.

Letters: B windows, T tokens, D hidden width, O output features, V vocabulary, K some of its tokens, N positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from qforge.calibration.precision import factor, fast_products, multiply
from qforge.calibration.room import Kept, Room
from qforge.models.blocks import BlockModel, Rounding
from qforge.progress import Progress

CHUNK = 128  # positions whose logits exist at once
Watch = Callable[[str, torch.Tensor], None]


class Logits(Protocol):
    """What follows the last block."""

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[N, V]` of hidden states `[N, D]`; those of these token ids `[K]` alone, `[N, K]`."""


def straight_through(rounding: Rounding) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A hook that rounds a linear's input; gradients pass as if it did not (arXiv 1308.3432)."""
    return lambda module, args: (args[0] + (rounding(args[0]) - args[0]).detach(), *args[1:])


def forwards(blocks: BlockModel, room: Room, batches: Sequence[torch.Tensor], progress: Progress) -> tuple[list[list[Kept]], list[torch.Tensor]]:
    """What each block takes, in half precision (by block and batch), and what the last one gives, `[B, T, D]` fp32, for token ids `[B, T]` batch by batch."""
    hidden = list(blocks.embed(batches))
    kept = []
    for index in progress.track(range(blocks.num_blocks), "run", blocks.num_blocks):
        kept.append([room.copy(h) for h in hidden])
        with blocks.block(index) as module, fast_products(module):
            hidden = [blocks.run(index, module, h) for h in hidden]
    return kept, hidden


def backwards(blocks: BlockModel, kept: list[list[Kept]], last: Sequence[torch.Tensor], watch: Watch, progress: Progress) -> Iterator[int]:
    """Tell `watch` of the gradients; yields the index of every block that is done, from the last to the first.

    Args:
        blocks: the model.
        kept: what each block took, by block and batch; used up.
        last: what the last block gave, `[B, T, D]`, batch by batch.
        watch: called with a linear's name, or a block's, and the gradient of log p(y) by its outputs, `[B, T, O]`; for the head, with roots of expected squares, `[N, V]`.
        progress: told of every block.
    """
    gradients = _by_last(blocks, last, watch)
    for index in progress.track(range(blocks.num_blocks - 1, -1, -1), "gradients", blocks.num_blocks):
        with blocks.block(index) as module, fast_products(module), _watched(blocks.linears(index), watch):
            for i, inputs in enumerate(kept.pop()):
                watch(blocks.block_names[index], gradients[i])
                x = inputs.load().float().requires_grad_()
                inputs.free()
                gradients[i] = torch.autograd.grad(blocks.run(index, module, x, gradients=True), x, gradients[i])[0]
        yield index


def _by_last(blocks: BlockModel, last: Sequence[torch.Tensor], watch: Watch) -> list[torch.Tensor]:
    """The gradients by the last block's outputs, shaped like them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with head(blocks) as logits:
        for hidden in last:
            positions = hidden.flatten(0, 1)
            gradient = torch.empty_like(positions)
            for x, target in zip(positions.split(CHUNK), gradient.split(CHUNK), strict=True):
                x = x.detach().requires_grad_()
                log_p = logits(x).log_softmax(-1)
                p = log_p.detach().exp()
                if blocks.head_name is not None:
                    watch(blocks.head_name, (p * (1 - p)).sqrt())
                drawn = torch.searchsorted(p.cumsum(-1), torch.rand(len(p), 1, generator=generator)).clamp_(max=p.shape[-1] - 1)  # torch.multinomial takes 20 times as long
                target.copy_(torch.autograd.grad(log_p.gather(1, drawn).sum(), x)[0])
            found.append(gradient.view_as(hidden))
    return found


@contextlib.contextmanager
def head(blocks: BlockModel) -> Iterator[Logits]:
    """From hidden states to logits, for gradients by the hidden states. The head's weight is rounded to what it is multiplied in once."""
    with blocks.head(gradients=True) as whole:
        if type(blocks.output_head) is not nn.Linear:
            yield lambda hidden, tokens=None: whole(hidden) if tokens is None else whole(hidden)[:, tokens]
            return
        linear: Any = blocks.output_head
        weight, bias = factor(linear.weight.detach()), linear.bias
        chosen: torch.Tensor | None = None

        def forward(x: torch.Tensor) -> torch.Tensor:
            return multiply(x, weight, bias) if chosen is None else multiply(x, weight[chosen], None if bias is None else bias[chosen])

        def logits(hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal chosen
            chosen = tokens
            return whole(hidden)

        linear.forward = forward
        try:
            yield logits
        finally:
            del linear.forward


@contextlib.contextmanager
def _watched(linears: Mapping[str, nn.Linear], watch: Watch) -> Iterator[None]:
    """While open, gradients by what linears put out are told as they are computed."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        return lambda module, args, output: output.register_hook(lambda gradient: watch(name, gradient)) and None

    handles = [module.register_forward_hook(hook(name)) for name, module in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
