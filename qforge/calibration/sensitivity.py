"""How much each linear's rounding will move the model's predictions: KL divergence by linear and scheme, to second order, without ever running a rounded model.

With E = Q - W the rounding error of one linear, a its inputs and g the gradient of log p(y) by its outputs, y drawn from the model's own predictions, the KL divergence of the
unquantized model from the one with Q is 1/2 mean_t (g_t^T E a_t)^2 to second order: the Fisher information is the divergence's Hessian. Tokens are taken as independent and so are
the errors of different rows (KFAC, Martens & Grosse, arXiv 1503.05671); then, with g_to^2 as a product of a token's share w_t (1 on average) and an output's mean G_o,
it is 1/2 sum_o G_o (E A E^T)_oo, A = mean_t w_t a_t a_t^T. KFAC proper has w_t = 1, which is far off where the few tokens with huge activations have small gradients.

Three times block by block: one batch forwards, the same batch back for the gradients, and all batches forwards while every candidate scheme of every linear is really rounded to.

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
class _Gradients:
    """Of one linear: mean squared gradient of each output `[O]`, and each token's share of it `[B * T]`, 1 on average."""

    outputs: torch.Tensor
    tokens: torch.Tensor


def measure(study: Study, windows: torch.Tensor, progress: Progress) -> list[Sensitivity]:
    """Predict what each candidate does to the model.

    Args:
        study: model, candidates, method.
        windows: calibration token ids `[B, T]`. Gradients are taken at the first batch: on stories15M 1,024, 4,096 and 16,384 tokens rank layers alike.
        progress: told of every block.

    Raises:
        NumericalError: activations or gradients are NaN or infinite.
    """
    blocks = study.blocks
    hidden = [study.room.keep(h) for h in blocks.embed(windows.split(max(1, BATCH_TOKENS // windows.shape[1])))]
    gradients = _gradients(blocks, hidden[0].load(), study.room, progress)
    found: dict[str, Sensitivity] = {}
    for index in progress.track(range(blocks.num_blocks), "measure schemes", blocks.num_blocks):
        hidden = _try_block(study, index, hidden, gradients, found)
    if blocks.head_name in study.candidates:
        _try_head(study, hidden, gradients, found)
    return [found[name] for name in study.candidates]


def _gradients(blocks: BlockModel, first: torch.Tensor, room: Room, progress: Progress) -> dict[str, _Gradients]:
    """Of every linear, for a batch of the first block's inputs `[B, T, D]`."""
    kept: list[Kept] = []
    hidden = first
    for index in range(blocks.num_blocks):
        kept.append(room.copy(hidden))
        with blocks.block(index) as module:
            hidden = blocks.run(index, module, hidden)
    found, gradient = _head_gradients(blocks, hidden)
    for index in progress.track(range(blocks.num_blocks - 1, -1, -1), "measure gradients", blocks.num_blocks):
        of_block, gradient = _block_gradients(blocks, index, kept.pop(), gradient)
        found |= of_block
    return found


def _head_gradients(blocks: BlockModel, hidden: torch.Tensor) -> tuple[dict[str, _Gradients], torch.Tensor]:
    """From the last block's outputs `[B, T, D]`: the head's gradients by its name, and that of log p(y) by these outputs `[B, T, D]`."""
    generator = torch.Generator().manual_seed(0)
    outputs, tokens = torch.zeros(blocks.vocab_size), []
    positions = hidden.flatten(0, 1)
    gradient = torch.empty_like(positions)
    with blocks.head(gradients=True) as logits:
        for x, target in zip(positions.split(CHUNK), gradient.split(CHUNK), strict=True):
            x = x.detach().requires_grad_()
            log_p = logits(x).log_softmax(-1)
            p = log_p.detach().exp()
            squares = p * (1 - p)  # expected ones, over y
            outputs += squares.sum(0)
            tokens.append(squares.sum(1))
            drawn = torch.searchsorted(p.cumsum(-1), torch.rand(len(p), 1, generator=generator)).clamp_(max=p.shape[-1] - 1)  # torch.multinomial takes 20 times as long
            target.copy_(torch.autograd.grad(log_p.gather(1, drawn).sum(), x)[0])
    head = {} if blocks.head_name is None else {blocks.head_name: _normalized(outputs / len(positions), torch.cat(tokens))}
    return head, gradient.view_as(hidden)


def _block_gradients(blocks: BlockModel, index: int, inputs: Kept, gradient: torch.Tensor) -> tuple[dict[str, _Gradients], torch.Tensor]:
    """From the gradient by a block's outputs `[B, T, D]`: its linears' gradients, and the gradient by the block's inputs."""
    found: dict[str, _Gradients] = {}
    with blocks.block(index) as module:
        x = inputs.load().float().requires_grad_()
        inputs.free()
        with _watched(blocks.linears(index), found):
            by_inputs = torch.autograd.grad(blocks.run(index, module, x, gradients=True), x, gradient)[0]
    return found, by_inputs


def _normalized(outputs: torch.Tensor, tokens: torch.Tensor) -> _Gradients:
    return _Gradients(outputs, tokens / tokens.mean().clamp(min=1e-30))


@contextlib.contextmanager
def _watched(linears: Mapping[str, nn.Linear], found: dict[str, _Gradients]) -> Iterator[None]:
    """While open, gradients of what linears put out are noted as they are computed."""

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            squares = gradient.flatten(0, -2).square()
            found[name] = _normalized(squares.mean(0), squares.sum(1))

        return lambda module, args, output: output.register_hook(note) and None

    handles = [module.register_forward_hook(watch(name)) for name, module in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _try_block(study: Study, index: int, hidden: list[Kept], gradients: Mapping[str, _Gradients], found: dict[str, Sensitivity]) -> list[Kept]:
    """Every candidate in a block; returns what the unquantized block gives."""
    outputs: list[Kept] = []
    with study.blocks.block(index) as module:
        linears = {n: m for n, m in study.blocks.linears(index).items() if n in study.candidates}
        stats: Stats | None = None
        for stop in lockstep(linears, lambda h: study.blocks.run(index, module, h), hidden, outputs, study.room, {}):
            if not stop.repeated or stats is None:
                stats, first = _summed(linears[stop.name].in_features, stop.inputs())
            shared = next(reversed(found.values())).shared if stop.repeated else len(found)
            found[stop.name] = _try(study, stop.name, linears[stop.name].weight.detach(), stats, first, gradients[stop.name], shared)
    return outputs


def _try_head(study: Study, hidden: Sequence[Kept], gradients: Mapping[str, _Gradients], found: dict[str, Sensitivity]) -> None:
    name = study.blocks.head_name
    assert name is not None
    weight = study.blocks.head_weight()
    stats, first = _summed(weight.shape[1], study.blocks.head_inputs(h.load() for h in hidden))
    found[name] = _try(study, name, weight, stats, first, gradients[name], len(found))


def _summed(in_features: int, inputs: Iterator[torch.Tensor]) -> tuple[Stats, torch.Tensor]:
    """Statistics of all batches, and the first batch `[B * T, I]`."""
    sums = Sums(frozenset({"hessian"}), in_features)
    first = None
    for x in inputs:
        sums.add(x)
        first = x.reshape(-1, in_features).clone() if first is None else first
    assert first is not None
    return sums.stats(), first


def _try(study: Study, name: str, weight: torch.Tensor, stats: Stats, first: torch.Tensor, gradients: _Gradients, shared: int) -> Sensitivity:
    weighted = (first * gradients.tokens[:, None]).T @ first / len(first)
    divergence = {}
    for scheme in study.candidates[name]:
        try:
            q, _ = study.quantizer.quantize(weight, scheme, stats, study.options)
        except NumericalError as e:
            raise NumericalError(f"{name}: {e}") from e
        error = numerics.dequantize(q) - weight
        rows = (error @ weighted * error).sum(1).clamp_(min=0)
        divergence[scheme] = 0.5 * float(rows.double() @ gradients.outputs.double())
    if not all(map(math.isfinite, divergence.values())):
        raise NumericalError(f"{name}: gradients of the calibration text are NaN or infinite")
    return Sensitivity(name, shared, divergence)
