"""How much each linear's rounding will move the model's predictions: KL divergence by linear and scheme, to second order, from one pass forward and one back.

With E = Q - W the rounding error of one linear, a its inputs and g the gradient of log p(y) by its outputs, y drawn from the model's own predictions, the KL divergence of the
unquantized model from the one with Q is 1/2 mean_t (g_t^T E a_t)^2 to second order: the Fisher information is the divergence's Hessian. With the two factors taken as independent
(KFAC, Martens & Grosse, arXiv 1503.05671), and with the errors of different rows as uncorrelated, that is 1/2 sum_o mean_t(g_to^2) (E A E^T)_oo, A = mean_t a_t a_t^T.

Block by block, both ways: forwards, every candidate scheme of a linear is really rounded to, which gives the row errors (E A E^T)_oo; backwards, each block is run once more from
its kept inputs, for the gradients.

Letters: B windows, T tokens, D hidden width, I input features, O output features, V vocabulary, N positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.lockstep import lockstep
from qforge.calibration.room import Kept, Room
from qforge.calibration.sequential import BATCH_TOKENS
from qforge.calibration.statistics import Sums
from qforge.errors import NumericalError
from qforge.methods import Options, Quantizer, Stats
from qforge.models.blocks import BlockModel
from qforge.progress import Progress
from qforge.scheme import Scheme

CHUNK = 128  # positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What was measured of one linear.

    Attributes:
        name: of the linear.
        shared: a number that linears with the same input have in common.
        divergence: predicted KL divergence in nats per token if this linear alone is quantized, by scheme.
    """

    name: str
    shared: int
    divergence: dict[Scheme, float]


@dataclass(frozen=True, slots=True)
class Study:
    """What is measured.

    Attributes:
        blocks: the merged model.
        quantizer: rounds; without the correction for the errors of other linears.
        candidates: schemes to try, by module name.
        options: of the method.
        room: keeps activations.
    """

    blocks: BlockModel
    quantizer: Quantizer
    candidates: Mapping[str, Sequence[Scheme]]
    options: Options
    room: Room = field(default_factory=Room)


@dataclass(frozen=True, slots=True)
class _Errors:
    """Of one linear: (E A E^T)_oo `[O]` by scheme, and the number of its input."""

    shared: int
    rows: dict[Scheme, torch.Tensor]


def measure(study: Study, windows: torch.Tensor, progress: Progress) -> list[Sensitivity]:
    """Predict what each candidate does to the model.

    Args:
        study: model, candidates, method.
        windows: calibration token ids `[B, T]`. Gradients are taken at the first batch: on stories15M 1,024, 4,096 and 16,384 tokens rank layers alike.
        progress: told of every block, twice.

    Raises:
        NumericalError: activations or gradients are NaN or infinite.
    """
    blocks, room = study.blocks, study.room
    hidden = [room.keep(h) for h in blocks.embed(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))]
    kept: list[Kept] = []
    errors: dict[str, _Errors] = {}
    for index in progress.track(range(blocks.num_blocks), "measure errors", blocks.num_blocks):
        kept.append(room.copy(hidden[0].load()))
        hidden = _try_block(study, index, hidden, errors)
    if blocks.head_name in study.candidates:
        _try_head(study, hidden, errors)
    squares, gradient = _head_gradients(blocks, hidden[0].load())
    for index in progress.track(range(blocks.num_blocks - 1, -1, -1), "measure gradients", blocks.num_blocks):
        found, gradient = _block_gradients(blocks, index, kept.pop(), gradient)
        squares |= found
    return [_predicted(name, errors[name], squares[name]) for name in study.candidates]


def _try_block(study: Study, index: int, hidden: list[Kept], errors: dict[str, _Errors]) -> list[Kept]:
    """Row errors of every candidate in a block; returns what the unquantized block gives."""
    outputs: list[Kept] = []
    with study.blocks.block(index) as module:
        linears = {n: m for n, m in study.blocks.linears(index).items() if n in study.candidates}
        stats: Stats | None = None
        for stop in lockstep(linears, lambda h: study.blocks.run(index, module, h), hidden, outputs, study.room, {}):
            if not stop.repeated or stats is None:
                sums = Sums(frozenset({"hessian"}), linears[stop.name].in_features)
                for x in stop.inputs():
                    sums.add(x)
                stats = sums.stats()
            shared = len(errors) if not stop.repeated else next(reversed(errors.values())).shared
            errors[stop.name] = _try(study, stop.name, linears[stop.name].weight.detach(), stats, shared)
    return outputs


def _try_head(study: Study, hidden: Sequence[Kept], errors: dict[str, _Errors]) -> None:
    name = study.blocks.head_name
    assert name is not None
    weight = study.blocks.head_weight()
    sums = Sums(frozenset({"hessian"}), weight.shape[1])
    for x in study.blocks.head_inputs(h.load() for h in hidden):
        sums.add(x)
    errors[name] = _try(study, name, weight, sums.stats(), len(errors))


def _try(study: Study, name: str, weight: torch.Tensor, stats: Stats, shared: int) -> _Errors:
    assert stats.hessian is not None
    rows = {}
    for scheme in study.candidates[name]:
        try:
            q, _ = study.quantizer.quantize(weight, scheme, stats, study.options)
        except NumericalError as e:
            raise NumericalError(f"{name}: {e}") from e
        error = numerics.dequantize(q) - weight
        rows[scheme] = (error @ stats.hessian * error).sum(1).clamp_(min=0) / stats.tokens
    return _Errors(shared, rows)


def _head_gradients(blocks: BlockModel, hidden: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """From the last block's outputs `[B, T, D]`: mean squared gradient of log p(y) by the logits `[V]` under the head's name, and its gradient by these outputs `[B, T, D]`."""
    generator = torch.Generator().manual_seed(0)
    squares = torch.zeros(blocks.vocab_size)
    positions = hidden.flatten(0, 1)
    gradient = torch.empty_like(positions)
    with blocks.head(gradients=True) as logits:
        for x, target in zip(positions.split(CHUNK), gradient.split(CHUNK), strict=True):
            x = x.detach().requires_grad_()
            log_p = logits(x).log_softmax(-1)
            p = log_p.detach().exp()
            squares += (p * (1 - p)).sum(0)
            drawn = torch.searchsorted(p.cumsum(-1), torch.rand(len(p), 1, generator=generator)).clamp_(max=p.shape[-1] - 1)  # torch.multinomial takes 20 times as long
            target.copy_(torch.autograd.grad(log_p.gather(1, drawn).sum(), x)[0])
    return ({} if blocks.head_name is None else {blocks.head_name: squares / len(positions)}), gradient.view_as(hidden)


def _block_gradients(blocks: BlockModel, index: int, inputs: Kept, gradient: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """From the gradient by a block's outputs `[B, T, D]`: the mean squared gradient by each linear's outputs `[O]`, and the gradient by the block's inputs."""
    with blocks.block(index) as module:
        linears = blocks.linears(index)
        sums = {name: torch.zeros(m.out_features) for name, m in linears.items()}
        x = inputs.load().float().requires_grad_()
        inputs.free()
        with _squares_added(linears, sums):
            by_inputs = torch.autograd.grad(blocks.run(index, module, x, gradients=True), x, gradient)[0]
    return {name: total / gradient[..., 0].numel() for name, total in sums.items()}, by_inputs


@contextlib.contextmanager
def _squares_added(linears: Mapping[str, nn.Linear], sums: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, squared gradients of what linears put out are added to `sums`, as they are computed."""

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            sums[name].add_(gradient.reshape(-1, gradient.shape[-1]).square().sum(0))

        return lambda module, args, output: output.register_hook(add) and None

    handles = [module.register_forward_hook(watch(name)) for name, module in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _predicted(name: str, errors: _Errors, squares: torch.Tensor) -> Sensitivity:
    divergence = {scheme: 0.5 * float(rows.double() @ squares.double()) for scheme, rows in errors.rows.items()}
    if not all(map(math.isfinite, divergence.values())):
        raise NumericalError(f"{name}: gradients of the calibration text are NaN or infinite")
    return Sensitivity(name, errors.shared, divergence)
