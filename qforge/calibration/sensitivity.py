"""How much each linear's rounding will move the model's predictions: KL divergence by linear and scheme, to second order, without ever running a rounded model.

With E = Q - W the rounding error of one linear, a its inputs and g the gradient of log p(y) by its outputs, y drawn from the model's own predictions, the KL divergence of the
unquantized model from the one with Q is 1/2 mean_t (g_t^T E a_t)^2 to second order: the Fisher information is the divergence's Hessian. Tokens are taken as independent and so are
the errors of different rows (KFAC, Martens & Grosse, arXiv 1503.05671); then, with g_to^2 as a product of a token's share w_t (1 on average) and an output's mean G_o,
it is 1/2 sum_o G_o (E A E^T)_oo, A = mean_t w_t a_t a_t^T. KFAC proper has w_t = 1, which is far off where the few tokens with huge activations have small gradients.

Three times block by block: one batch forwards, the same batch back for the gradients, and all batches forwards while every candidate scheme of every linear is really rounded to.

Letters: B windows, T tokens, D hidden width, I input features, O output features, V vocabulary, N positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from qforge import numerics
from qforge.calibration.gradients import backwards, forwards
from qforge.calibration.lockstep import lockstep
from qforge.calibration.precision import fast_products
from qforge.calibration.room import Kept, Room
from qforge.calibration.statistics import Sums
from qforge.calibration.streams import BATCH_TOKENS
from qforge.errors import NumericalError
from qforge.methods import Options, Quantizer, Stats
from qforge.models.blocks import BlockModel
from qforge.progress import Progress
from qforge.scheme import Scheme


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
    """Of one linear: mean squared gradient of each output `[O]`, and each token's share of it `[N]`, 1 on average; of the first batch's tokens that it is given."""

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
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    gradients = _gradients(study, batches[0], progress)
    hidden = [study.room.keep(h) for h in blocks.embed(batches)]
    found: dict[str, Sensitivity] = {}
    for index in progress.track(range(blocks.num_blocks), "measure schemes", blocks.num_blocks):
        hidden = _try_block(study, index, hidden, gradients, found)
    if blocks.head_name in study.candidates:
        _try_head(study, hidden, gradients, found)
    return [found[name] for name in study.candidates]


def _gradients(study: Study, windows: torch.Tensor, progress: Progress) -> dict[str, _Gradients]:
    """Of every linear, for one batch of token ids `[B, T]`; an expert that no token reaches has none."""
    squares: dict[str, list[torch.Tensor]] = {}
    kept, last = forwards(study.blocks, study.room, [windows], progress)

    def add(name: str, gradient: torch.Tensor) -> None:
        here = gradient.flatten(0, -2).square()
        outputs, *tokens = squares.get(name, [torch.zeros(here.shape[1])])
        squares[name] = [outputs + here.sum(0), *tokens, here.sum(1)]

    for _ in backwards(study.blocks, kept, last, add, progress):
        pass
    return {name: _normalized(outputs, torch.cat(tokens)) for name, (outputs, *tokens) in squares.items() if sum(map(len, tokens))}


def _normalized(outputs: torch.Tensor, tokens: torch.Tensor) -> _Gradients:
    return _Gradients(outputs / len(tokens), tokens / tokens.mean().clamp(min=1e-30))


def _try_block(study: Study, index: int, hidden: list[Kept], gradients: Mapping[str, _Gradients], found: dict[str, Sensitivity]) -> list[Kept]:
    """Every candidate in a block; returns what the unquantized block gives. All experts of a block count as sharing an input: engines want one scheme for them."""
    outputs: list[Kept] = []
    with study.blocks.block(index) as module, fast_products(module):
        linears = {n: m for n, m in study.blocks.linears(index).items() if n in study.candidates}
        tokens = hidden[0].shape[:-1].numel()
        experts: int | None = None
        stats: Stats | None = None
        for stop in lockstep(linears, lambda h: study.blocks.run(index, module, h), hidden, outputs, study.room, {}):
            if not stop.repeated or stats is None:
                stats, first = _summed(linears[stop.name].in_features, stop.inputs())
            shared = next(reversed(found.values())).shared if stop.repeated else len(found)
            if stop.name in study.blocks.experts:
                experts = shared = shared if experts is None else experts
            reached = gradients.get(stop.name) if stop.batches[0] == 0 else None
            found[stop.name] = _try(study, stop.name, linears[stop.name].weight.detach(), stats, first / tokens**0.5, reached, shared)
        for name in linears.keys() - found.keys():  # experts that no token reaches
            found[name] = Sensitivity(name, len(found) if experts is None else experts, dict.fromkeys(study.candidates[name], 0.0))
    return outputs


def _try_head(study: Study, hidden: Sequence[Kept], gradients: Mapping[str, _Gradients], found: dict[str, Sensitivity]) -> None:
    name = study.blocks.head_name
    assert name is not None
    weight = study.blocks.head_weight()
    stats, first = _summed(weight.shape[1], study.blocks.head_inputs(h.load() for h in hidden))
    found[name] = _try(study, name, weight, stats, first / len(first) ** 0.5, gradients[name], len(found))


def _summed(in_features: int, inputs: Iterator[torch.Tensor]) -> tuple[Stats, torch.Tensor]:
    """Statistics of all batches, and the first batch `[B * T, I]`."""
    sums = Sums(frozenset({"hessian"}), in_features)
    first = None
    for x in inputs:
        sums.add(x)
        first = x.reshape(-1, in_features).clone() if first is None else first
    assert first is not None
    return sums.stats(), first


def _try(study: Study, name: str, weight: torch.Tensor, stats: Stats, first: torch.Tensor, gradients: _Gradients | None, shared: int) -> Sensitivity:
    """`first`: the first batch's inputs `[N, I]`, over the square root of all its tokens. What no gradient reaches is taken to matter nothing."""
    if gradients is None:
        return Sensitivity(name, shared, dict.fromkeys(study.candidates[name], 0.0))
    weighted = (first * gradients.tokens[:, None]).T @ first
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
