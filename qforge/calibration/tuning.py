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
from qforge.calibration.gradients import straight_through
from qforge.calibration.room import Kept, Room
from qforge.methods import BlockTuner, Options
from qforge.models.blocks import BlockModel, Rounding
from qforge.qlinear import QuantizedLinear
from qforge.types import LayerResult

STEP_TOKENS = 1024  # of one gradient
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
    def parts(self) -> list[tuple[int, slice]]:
        """Batch and rows of what one gradient is taken of."""
        return [(i, rows) for i, x in enumerate(self.inputs) for rows in step_rows(*x.shape[:2])]

    def error(self, part: int, weights: Mapping[str, torch.Tensor]) -> float:
        """See `Block.error`."""
        return float(self._error(part, weights, gradients=False))

    def gradients(self, part: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Block.gradients`."""
        error = self._error(part, weights, gradients=True)
        found = torch.autograd.grad(error, [self.linears[n].weight for n in weights], allow_unused=True, materialize_grads=True)
        return dict(zip(weights, found, strict=True))

    def _error(self, part: int, weights: Mapping[str, torch.Tensor], *, gradients: bool) -> torch.Tensor:
        batch, rows = self.parts[part]
        self._set(weights, gradients=gradients)
        output, wanted = self._run(self.inputs[batch].load()[rows], gradients=gradients), self.outputs[batch].load()[rows]
        with torch.set_grad_enabled(gradients):
            difference = output - wanted
            weighed = difference if self.metric is None else difference @ self.metric
            return (weighed * difference).sum(-1).mean()

    def finish(self, weights: Mapping[str, torch.Tensor], room: Room) -> tuple[list[Kept], dict[str, float]]:
        """What the block puts out with these weights, by batch, and each linear's relative output error in the first batch that runs it; the inputs are used up."""
        self._set(weights, gradients=False)
        outputs: list[Kept] = []
        errors: dict[str, float] = {}
        for x in self.inputs:
            with contextlib.ExitStack() as hooks:
                for name in weights.keys() - errors.keys():
                    hooks.callback(self.linears[name].register_forward_hook(self._measures(name, weights[name], errors)).remove)
                output = self._run(x.load(), gradients=False)
            x.free()
            outputs.append(room.keep(output))
        return outputs, errors

    def _measures(self, name: str, weight: torch.Tensor, errors: dict[str, float]) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            wanted = args[0] @ self.targets[name].T
            if wanted.numel():
                errors[name] = float((args[0] @ (weight - self.targets[name]).T).norm() / wanted.norm().clamp(min=1e-30))

        return hook

    def _set(self, weights: Mapping[str, torch.Tensor], *, gradients: bool) -> None:
        for name, weight in weights.items():
            self.linears[name].weight = nn.Parameter(weight, requires_grad=gradients)

    def _run(self, hidden: torch.Tensor, *, gradients: bool) -> torch.Tensor:
        with self._rounding():
            return self.blocks.run(self.index, self.module, hidden, gradients=gradients)

    @contextlib.contextmanager
    def _rounding(self) -> Iterator[None]:
        handles = [self.linears[name].register_forward_pre_hook(straight_through(rounding)) for name, rounding in self.roundings.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def tune(block: TunedBlock, tuner: BlockTuner, options: Options, done: Done, room: Room, outputs: list[Kept]) -> dict[str, tuple[QuantizedLinear, LayerResult]]:
    """Tune a block's linears, and put what it then puts out into `outputs`; its inputs are used up."""
    found = dict(block.start) | tuner.tune(block, options)
    weights = {name: numerics.dequantize(q) for name, q in found.items()}
    outputs[:], errors = block.finish(weights, room)
    results = {}
    for name, q in found.items():
        target, before = block.targets[name], done[name][1]
        relative = float((weights[name] - target).norm() / target.norm().clamp(min=1e-30))
        results[name] = q, replace(before, relative_error=relative, output_error=errors.get(name, before.output_error))
    return results


def step_rows(windows: int, tokens: int) -> list[slice]:
    """How a batch of so many windows is cut for gradients."""
    size = max(1, STEP_TOKENS // tokens)
    return [slice(start, min(start + size, windows)) for start in range(0, windows, size)]
