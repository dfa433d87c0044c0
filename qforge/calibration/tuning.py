"""A decoder block for methods that tune it as a whole: what the quantized model feeds it, what the unquantized model has behind it, and gradients.

Letters: B windows, T tokens, D hidden width, O output features, I input features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.room import Kept, Room
from qforge.methods import BlockTuner, Options
from qforge.models.blocks import BlockModel
from qforge.qlinear import QuantizedLinear
from qforge.types import LayerResult

Rounding = Callable[[torch.Tensor], torch.Tensor]
Done = Mapping[str, tuple[QuantizedLinear, LayerResult]]


@dataclass(frozen=True, slots=True)
class TunedBlock:
    """A materialised block whose linears are quantized (`methods.tuning.Block`).

    Attributes:
        blocks: the model.
        index: of the block.
        module: the block; weights of `linears` are replaced by what is tried.
        linears: its linears by name.
        start: the quantized ones among them.
        targets: their weights, `[O, I]` fp32.
        inputs: what the quantized model feeds the block, `[B, T, D]` fp32, by batch.
        outputs: what the unquantized model has behind it, by batch.
        metric: `[D, D]` fp32, how errors behind it weigh against each other; None for all alike.
        roundings: what linears do to their inputs.
    """

    blocks: BlockModel
    index: int
    module: nn.Module
    linears: Mapping[str, nn.Linear]
    start: Mapping[str, QuantizedLinear]
    targets: Mapping[str, torch.Tensor]
    inputs: Sequence[Kept]
    outputs: Sequence[Kept]
    metric: torch.Tensor | None
    roundings: Mapping[str, Rounding]

    @property
    def batches(self) -> int:
        """See `Block.batches`."""
        return len(self.inputs)

    def error(self, batch: int, weights: Mapping[str, torch.Tensor]) -> float:
        """See `Block.error`."""
        return float(self._error(batch, weights, gradients=False))

    def gradients(self, batch: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Block.gradients`."""
        error = self._error(batch, weights, gradients=True)
        found = torch.autograd.grad(error, [self.linears[n].weight for n in weights], allow_unused=True, materialize_grads=True)
        return dict(zip(weights, found, strict=True))

    def _error(self, batch: int, weights: Mapping[str, torch.Tensor], *, gradients: bool) -> torch.Tensor:
        with torch.set_grad_enabled(gradients):
            difference = self.run(batch, weights, gradients=gradients) - self.outputs[batch].load()
            weighed = difference if self.metric is None else difference @ self.metric
            return (weighed * difference).sum(-1).mean()

    def run(self, batch: int, weights: Mapping[str, torch.Tensor], *, gradients: bool = False) -> torch.Tensor:
        """What the block puts out, `[B, T, D]`, with these weights in its linears."""
        for name, weight in weights.items():
            self.linears[name].weight = nn.Parameter(weight, requires_grad=gradients)
        with self._rounding():
            return self.blocks.run(self.index, self.module, self.inputs[batch].load(), gradients=gradients)

    @contextlib.contextmanager
    def _rounding(self) -> Iterator[None]:
        handles = [self.linears[name].register_forward_pre_hook(_through(rounding)) for name, rounding in self.roundings.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def tune(block: TunedBlock, tuner: BlockTuner, options: Options, done: Done, room: Room, outputs: list[Kept]) -> dict[str, tuple[QuantizedLinear, LayerResult]]:
    """Tune a block's linears, and put what it then puts out into `outputs`; its inputs are used up."""
    found = dict(block.start) | tuner.tune(block, options)
    weights = {name: numerics.dequantize(q) for name, q in found.items()}
    outputs.clear()
    for batch in range(block.batches):
        outputs.append(room.keep(block.run(batch, weights)))
        block.inputs[batch].free()
    return {name: (q, replace(done[name][1], relative_error=_relative(weights[name], block.targets[name]))) for name, q in found.items()}


def _relative(weight: torch.Tensor, target: torch.Tensor) -> float:
    return float((weight - target).norm() / target.norm().clamp(min=1e-30))


def _through(rounding: Rounding) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Rounds an input; gradients pass as if it did not."""
    return lambda module, args: (args[0] + (rounding(args[0]) - args[0]).detach(), *args[1:])
