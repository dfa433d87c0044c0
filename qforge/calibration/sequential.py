"""Block after block: every linear is quantized from what it is fed when all before it are quantized already, and the block's outputs feed the next one.

A finished block is a piece in the journal, and now and then so are the hidden states after it, so that a killed run goes on where it was, with
the same bytes.

Everything is computed where tensors come into being: within `with torch.device(card)` on a card, block after block, what waits between two blocks in the processor's memory.

Letters: B windows, T tokens, D hidden width, I input features.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.linear import quantize_linear
from qforge.calibration.lockstep import Stop, lockstep
from qforge.calibration.originals import Originals
from qforge.calibration.precision import fast_products
from qforge.calibration.replay import finished_block
from qforge.calibration.room import Kept, Room
from qforge.calibration.statistics import Sums
from qforge.calibration.store import Hidden, Piece, Store
from qforge.calibration.transforms import PROBE, Folds, choose_folds
from qforge.calibration.tuning import TunedBlock, step_rows, tune
from qforge.methods import BlockTuner, Options, Quantizer, Stats, Transform, statistics_needed
from qforge.methods.coupled import damped
from qforge.models.blocks import BlockModel, release
from qforge.progress import Progress
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import LayerResult

BATCH_TOKENS = 1024  # enough for matrix products at full speed; more, and what an operation leaves is gone from the caches before the next one reads it
SAVING_SHARE = 20  # hidden states are kept so seldom that keeping them takes at most one part of so many


@dataclass(slots=True)
class Streams:
    """The calibration text on its way through the model: hidden states `[B, T, D]` fp32, batch by batch.

    Attributes:
        quantized: as the quantized model has them.
        original: as the unquantized model has them; None where the method does not ask.
        probe: the first block's inputs for a few tokens `[1, T, D]`, to find links with.
    """

    quantized: list[Kept]
    original: list[Kept] | None
    probe: torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same for all blocks.

    Attributes:
        blocks: the merged model.
        quantizer: the method.
        schemes: target scheme by module name.
        options: of the method.
        room: keeps activations.
        transforms: fold factors into a block's weights before it is quantized, in this order.
        tuner: improves the linears of a block together once all are quantized; None for methods that do not.
        outputs: how the outputs of a block's linears weigh against each other (`fisher.py`), by linear, for methods that ask; they are the unquantized model's.
    """

    blocks: BlockModel
    quantizer: Quantizer
    schemes: Mapping[str, Scheme]
    options: Options
    room: Room = field(default_factory=Room)
    transforms: tuple[Transform, ...] = ()
    tuner: BlockTuner | None = None
    outputs: Callable[[int], Hidden] = lambda index: {}

    @property
    def needs(self) -> frozenset[str]:
        """Statistics to gather."""
        return statistics_needed(self.quantizer, self.schemes.values(), self.options)

    @property
    def follows_original(self) -> bool:
        """Whether the unquantized model goes through the blocks, too."""
        return not self.needs.isdisjoint({"cross", "targets"})


def quantize_blocks(job: Job, windows: torch.Tensor | None, store: Store, progress: Progress) -> None:
    """Quantize every linear named in `job.schemes`; results go to `store`.

    Args:
        job: model, method, schemes.
        windows: calibration token ids `[B, T]`, None where nothing needs statistics.
        store: finished work.
        progress: told of every block.
    """
    blocks = job.blocks
    stages = blocks.num_blocks + (blocks.head_name in job.schemes)
    finished = 0
    while finished < stages and _loaded(store, finished) is not None:
        finished += 1
    if finished == stages:
        return
    streams = None if windows is None else _inputs_of(job, finished, windows, store)
    clock, kept, took = job.room.clock, time.monotonic(), 0.0
    for index in progress.track(range(finished, stages), "quantize", stages - finished):
        piece = _head(job, streams) if index == blocks.num_blocks else _quantize_block(job, index, streams)
        with clock.part("write"), torch.device("cpu"):
            store.save(index, piece)
            del piece  # or it would lie beside the next block
            if streams is not None and index + 1 < stages and time.monotonic() - kept >= max(store.hidden_every, SAVING_SHARE * took):
                start = time.monotonic()
                store.save_hidden(index, _named(streams))
                kept = time.monotonic()
                took = kept - start


def _inputs_of(job: Job, index: int, windows: torch.Tensor, store: Store) -> Streams:
    """Hidden states that block `index` takes: the newest kept ones, replayed through the finished blocks after them."""
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    with torch.device("cpu"):
        found = next(((done, hidden) for done in range(index - 1, -1, -1) if (hidden := store.load_hidden(done)) is not None), None)
    streams = Streams([], [] if job.follows_original else None, torch.empty(0))
    with job.room.clock.part("load"):
        steps = [] if job.tuner is None else [b[rows] for b in (batches[0], batches[-1]) for rows in step_rows(*b.shape)]
        for _ in job.blocks.embed(steps):
            pass
        for embedded in job.blocks.embed([windows[:1, :PROBE], *batches]):  # also records what blocks are called with
            if not streams.probe.numel():
                streams.probe = embedded
            elif found is None:
                _add(job, streams, embedded, embedded)
    if found is not None:
        with torch.device("cpu"):
            for i in range(len(batches)):
                _add(job, streams, found[1][f"quantized.{i}"].load(), found[1][f"original.{i}"].load() if streams.original is not None else None)
    for done in range(0 if found is None else found[0] + 1, index):
        piece = _loaded(store, done)
        assert piece is not None
        _replay(job, done, piece, streams)
    return streams


def _loaded(store: Store, index: int) -> Piece | None:
    with torch.device("cpu"):
        return store.load(index)


def _add(job: Job, streams: Streams, quantized: torch.Tensor, original: torch.Tensor | None) -> None:
    streams.quantized.append(job.room.keep(quantized))
    if streams.original is not None and original is not None:
        streams.original.append(job.room.keep(original))


def _named(streams: Streams) -> Hidden:
    hidden = {f"quantized.{i}": h for i, h in enumerate(streams.quantized)}
    return hidden | {f"original.{i}": h for i, h in enumerate(streams.original or [])}


def _replay(job: Job, index: int, piece: Piece, streams: Streams) -> None:
    """Run a finished block on all batches of both streams, in place."""
    with job.room.clock.part("replay"):
        with finished_block(job.blocks, index, piece) as module:
            _advance(job, index, module, streams.quantized)
        if streams.original is not None:
            with job.blocks.block(index) as module, fast_products(module):
                _advance(job, index, module, streams.original)


def _advance(job: Job, index: int, module: nn.Module, hidden: list[Kept]) -> None:
    for i, batch in enumerate(hidden):
        out = job.blocks.run(index, module, batch.load())
        batch.free()
        hidden[i] = job.room.keep(out)


def _quantize_block(job: Job, index: int, streams: Streams | None) -> Piece:
    clock = job.room.clock
    with contextlib.ExitStack() as stack:
        with clock.part("load"):
            module = stack.enter_context(job.blocks.block(index))
        linears = {n: m for n, m in job.blocks.linears(index).items() if n in job.schemes}
        done: dict[str, tuple[QuantizedLinear, LayerResult]] = {}
        folds = Folds()
        largest: dict[str, torch.Tensor] = {}  # inputs of experts, by projection: what an expert without tokens would be given is what the others are given
        if streams is not None:
            if job.transforms:
                with clock.part("transform"):
                    folds = choose_folds(job.blocks, index, module, streams.quantized, streams.probe, job.transforms, job.schemes, job.options)
            with clock.part("forward"), fast_products(module):
                _quantize_in_order(job, index, module, linears, streams, folds, done, largest)
        with clock.part("solve"):
            for name, linear in linears.items():  # without statistics, or never reached by them
                if name not in done:
                    unreached = None if streams is None else Stats(0, absmax=largest.get(_kind(name)))
                    done[name] = quantize_linear(name, linear.weight.detach(), job.schemes[name], job.quantizer, unreached, job.options)
    return Piece({n: done[n][0].to("cpu") for n in linears}, [done[n][1] for n in linears], {n: t.cpu() for n, t in folds.tensors.items()})


def _quantize_in_order(
    job: Job,
    index: int,
    module: nn.Module,
    linears: Mapping[str, nn.Linear],
    streams: Streams,
    folds: Folds,
    done: dict[str, tuple[QuantizedLinear, LayerResult]],
    largest: dict[str, torch.Tensor],
) -> None:
    """Quantize linears as the quantized stream reaches them (into `done`), and bring both streams behind the block; folds are applied in between."""

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return job.blocks.run(index, module, hidden)

    originals = Originals(job.room, run, linears if "cross" in job.needs else {}, streams.original, folds) if streams.original is not None else None
    folds.apply(module)
    inputs = [] if job.tuner is None else [job.room.keep(x.load()) for x in streams.quantized]
    targets: dict[str, torch.Tensor] = {}
    roundings: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    outputs: list[Kept] = []
    weighing = job.outputs(index)
    stats: Stats | None = None
    passed: nn.Linear | None = None
    for stop in lockstep(linears, run, streams.quantized, outputs, job.room, roundings):
        if passed is not None and job.tuner is None:
            release(passed)  # every batch that runs it has done so
        linear = passed = linears[stop.name]
        if not stop.repeated or stats is None:
            stats = None  # before the next linear's come into being
            stats = _gather(job, stop, linear.in_features, originals)
        if stats.absmax is not None and stop.name in job.blocks.experts:
            largest[_kind(stop.name)] = torch.maximum(stats.absmax, largest.get(_kind(stop.name), stats.absmax))
        with job.room.clock.part("solve"):
            stats.outputs = folds.weighed(stop.name, weighing[stop.name].load()) if stop.name in weighing else None
            if job.tuner is not None:
                targets[stop.name] = linear.weight.detach()
            q, _ = done[stop.name] = quantize_linear(stop.name, linear.weight.detach(), job.schemes[stop.name], job.quantizer, stats, job.options)
            linear.weight = nn.Parameter(numerics.dequantize(q), requires_grad=False)
        rounding = numerics.input_rounding(q.scheme, q.input_scale)
        if rounding is not None:
            roundings[stop.name] = rounding
    if job.tuner is not None and streams.original is not None:
        weighed = weighing.get(job.blocks.block_names[index])
        start = {name: q for name, (q, _) in done.items()}
        block = TunedBlock(job.blocks, index, module, linears, start, targets, inputs, streams.original, None if weighed is None else damped(weighed.load()), roundings)
        with job.room.clock.part("tune"):
            done |= tune(block, job.tuner, job.options, done, job.room, outputs)
    streams.quantized[:] = outputs


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _gather(job: Job, stop: Stop, in_features: int, originals: Originals | None) -> Stats:
    """Statistics of what all batches that wait will feed a linear."""
    with job.room.clock.part("statistics"):
        sums = Sums(job.needs, in_features)
        for batch, x, rows in zip(stop.batches, stop.inputs(), stop.rows, strict=True):
            sums.add(x, None if originals is None else originals.take(stop.name, batch, x, rows))
        stats = sums.stats()
        stats.clock = job.room.clock
        return stats


def _head(job: Job, streams: Streams | None) -> Piece:
    name = job.blocks.head_name
    assert name is not None
    with job.room.clock.part("load"):
        weight = job.blocks.head_weight()
    with job.room.clock.part("statistics"):
        stats = None if streams is None else _head_statistics(job, weight.shape[1], streams)
    with job.room.clock.part("solve"):
        q, layer = quantize_linear(name, weight, job.schemes[name], job.quantizer, stats, job.options)
    return Piece({name: q.to("cpu")}, [layer])


def _head_statistics(job: Job, in_features: int, streams: Streams) -> Stats:
    sums = Sums(job.needs, in_features)
    originals = [job.room.copy(x) for x in job.blocks.head_inputs(h.load() for h in streams.original or [])]
    for i, x in enumerate(job.blocks.head_inputs(h.load() for h in streams.quantized)):
        sums.add(x, originals[i].load() if originals else None)
    stats = sums.stats()
    stats.clock = job.room.clock
    return stats
