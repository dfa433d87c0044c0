"""How much each linear's rounding will move the model's predictions: KL divergence by linear and scheme, to second order, from one pass forward and one back.

With E = Q - W the rounding error of one linear, a its inputs and g the gradient of log p(y) by its outputs, y drawn from the model's own predictions, the KL divergence of the
unquantized model from the one with Q is 1/2 mean_t (g_t^T E a_t)^2 to second order: the Fisher information is the divergence's Hessian. With the two factors taken as independent
(KFAC, Martens & Grosse, arXiv 1503.05671), and with the errors of different rows as uncorrelated, that is 1/2 sum_o mean_t(g_to^2) (E A E^T)_oo, A = mean_t a_t a_t^T.

Block by block, both ways: forwards, every candidate scheme of a linear is really rounded to, which gives the row errors (E A E^T)_oo; backwards, each block is run once more from
its kept inputs, for the gradients.

Letters: B windows, T tokens, D hidden width, I input features, O output features, V vocabulary, N positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from qforge import numerics
from qforge.calibration.gradients import backwards
from qforge.calibration.lockstep import lockstep
from qforge.calibration.room import Kept, Room
from qforge.calibration.sequential import BATCH_TOKENS
from qforge.calibration.statistics import Sums
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
class _Errors:
    """Of one linear: (E A E^T)_oo `[O]` by scheme, the number of its input (one for all experts of a block, whose engines want one scheme), and its share of the tokens."""

    shared: int
    rows: dict[Scheme, torch.Tensor]
    share: float = 1.0


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
    kept: list[list[Kept]] = []
    errors: dict[str, _Errors] = {}
    for index in progress.track(range(blocks.num_blocks), "measure errors", blocks.num_blocks):
        kept.append([room.copy(hidden[0].load())])
        hidden = _try_block(study, index, hidden, errors)
    if blocks.head_name in study.candidates:
        _try_head(study, hidden, errors)
    squares: dict[str, torch.Tensor] = {}
    for _ in backwards(blocks, kept, [hidden[0].load()], lambda name, g: _add_squares(squares, name, g), progress):
        pass
    return [_predicted(name, errors[name], squares.get(name)) for name in study.candidates]


def _add_squares(squares: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    """Mean squares by output, `[O]`."""
    squares[name] = gradient if gradient.dim() == 1 else gradient.flatten(0, -2).square().mean(0)


def _try_block(study: Study, index: int, hidden: list[Kept], errors: dict[str, _Errors]) -> list[Kept]:
    """Row errors of every candidate in a block; returns what the unquantized block gives."""
    outputs: list[Kept] = []
    with study.blocks.block(index) as module:
        linears = {n: m for n, m in study.blocks.linears(index).items() if n in study.candidates}
        stats: Stats | None = None
        tokens = sum(h.shape[:-1].numel() for h in hidden)
        experts: int | None = None
        for stop in lockstep(linears, lambda h: study.blocks.run(index, module, h), hidden, outputs, study.room, {}):
            if not stop.repeated or stats is None:
                sums = Sums(frozenset({"hessian"}), linears[stop.name].in_features)
                for x in stop.inputs():
                    sums.add(x)
                stats = sums.stats()
            shared = len(errors) if not stop.repeated else next(reversed(errors.values())).shared
            if stop.name in study.blocks.experts:
                shared = experts = shared if experts is None else experts
            found = _try(study, stop.name, linears[stop.name].weight.detach(), stats, shared)
            errors[stop.name] = replace(found, share=stats.tokens / tokens)
        for name in linears.keys() - errors.keys():  # experts that no token reaches
            errors[name] = _Errors(len(errors) if experts is None else experts, {s: torch.zeros(linears[name].out_features) for s in study.candidates[name]}, 0.0)
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


def _predicted(name: str, errors: _Errors, squares: torch.Tensor | None) -> Sensitivity:
    """An expert that no gradient reached is taken to matter nothing, since its error reached nothing either."""
    divergence = {scheme: 0.0 if squares is None else 0.5 * errors.share * float(rows.double() @ squares.double()) for scheme, rows in errors.rows.items()}
    if not all(map(math.isfinite, divergence.values())):
        raise NumericalError(f"{name}: gradients of the calibration text are NaN or infinite")
    return Sensitivity(name, errors.shared, divergence)
