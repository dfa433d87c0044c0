"""Block after block: every linear is quantized from what it is fed when all before it are quantized already, and the block's outputs feed the next one.

A finished block is a piece in the journal, and now and then so are the hidden states after it, so that a killed run goes on where it was, with
the same bytes.

Everything is computed where tensors come into being: within `with torch.device(card)` on a card, block after block, what waits between two blocks in the processor's memory.

Letters: B windows, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.linear import quantize_linear, reaches
from qforge.calibration.precision import fast_products
from qforge.calibration.room import Room
from qforge.calibration.shared import SharedText, Worker
from qforge.calibration.statistics import Sums
from qforge.calibration.store import Hidden, Piece, Store
from qforge.calibration.streams import Streams, Text
from qforge.calibration.transforms import Folds, choose_folds
from qforge.calibration.tuning import TunedBlock, tune
from qforge.methods import BlockTuner, Options, Quantizer, Stats, Transform, statistics_needed
from qforge.methods.coupled import damped
from qforge.models.blocks import BlockModel, release
from qforge.progress import Progress
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import LayerResult

SAVING_SHARE = 20  # hidden states are kept so seldom that keeping them takes at most one part of so many


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
        workers: starts processes that share the calibration text; None where this one has it all.
    """

    blocks: BlockModel
    quantizer: Quantizer
    schemes: Mapping[str, Scheme]
    options: Options
    room: Room = field(default_factory=Room)
    transforms: tuple[Transform, ...] = ()
    tuner: BlockTuner | None = None
    outputs: Callable[[int], Hidden] = lambda index: {}
    workers: Callable[[], contextlib.AbstractContextManager[Sequence[Worker]]] | None = None

    @property
    def needs(self) -> frozenset[str]:
        """Statistics to gather."""
        return statistics_needed(self.quantizer, self.schemes.values(), self.options)


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
    with _opened(job, windows) as text:
        if windows is not None and text is not None:
            _bring(job, text, windows, store, finished)
        clock, kept, took = job.room.clock, time.monotonic(), 0.0
        for index in progress.track(range(finished, stages), "quantize", stages - finished):
            piece = _head(job, text) if index == blocks.num_blocks else _quantize_block(job, index, text)
            with clock.part("write"), torch.device("cpu"):
                store.save(index, piece)
                del piece  # or it would lie beside the next block
                if text is not None and index + 1 < stages and time.monotonic() - kept >= max(store.hidden_every, SAVING_SHARE * took):
                    start = time.monotonic()
                    store.save_hidden(index, text.hidden())
                    kept = time.monotonic()
                    took = kept - start


@contextlib.contextmanager
def _opened(job: Job, windows: torch.Tensor | None) -> Iterator[Text | None]:
    """The text, in this process or shared among workers."""
    if windows is None:
        yield None
    elif job.workers is None:
        yield Streams(job.blocks, job.room, job.needs, tuned=job.tuner is not None)
    else:
        with contextlib.ExitStack() as stack:
            with job.room.clock.part("start workers"):
                workers = stack.enter_context(job.workers())
            yield SharedText(job.blocks, workers, job.needs)


def _bring(job: Job, text: Text, windows: torch.Tensor, store: Store, index: int) -> None:
    """Bring the text before block `index`: the newest kept hidden states, replayed through the finished blocks after them."""
    with torch.device("cpu"):
        found = next(((done, hidden) for done in range(index - 1, -1, -1) if (hidden := store.load_hidden(done)) is not None), None)
    with job.room.clock.part("load"):
        text.enter(windows, None if found is None else found[1])
    for done in range(0 if found is None else found[0] + 1, index):
        piece = _loaded(store, done)
        assert piece is not None
        with job.room.clock.part("replay"):
            text.replay(done, piece)


def _loaded(store: Store, index: int) -> Piece | None:
    with torch.device("cpu"):
        return store.load(index)


def _quantize_block(job: Job, index: int, text: Text | None) -> Piece:
    clock = job.room.clock
    with contextlib.ExitStack() as stack:
        with clock.part("load"):
            module = stack.enter_context(job.blocks.block(index))
        linears = {n: m for n, m in job.blocks.linears(index).items() if n in job.schemes}
        done: dict[str, tuple[QuantizedLinear, LayerResult]] = {}
        folds = Folds()
        reach: dict[str, float] = {}
        largest: dict[str, torch.Tensor] = {}  # inputs of experts, by projection: what an expert without tokens would be given is what the others are given
        if text is not None:
            if job.transforms:
                with clock.part("transform"):
                    gather = functools.partial(text.fold_sums, index, module)
                    folds = choose_folds(job.blocks, index, module, gather, text.probe, job.transforms, job.schemes, job.options)
            with clock.part("forward"), fast_products(module):
                _quantize_in_order(job, index, module, linears, text, folds, done, reach, largest)
        with clock.part("solve"):
            reach = reach or reaches(linears, job.schemes, corrected=False)
            for name, linear in linears.items():  # without statistics, or never reached by them
                if name not in done:
                    unreached = None if text is None else Stats(0, absmax=largest.get(_kind(name)))
                    done[name] = quantize_linear(name, linear.weight.detach(), job.schemes[name], job.quantizer, unreached, job.options, reach.get(name, 0.0))
    return Piece({n: done[n][0].to("cpu") for n in linears}, [done[n][1] for n in linears], {n: t.cpu() for n, t in folds.tensors.items()})


def _quantize_in_order(
    job: Job,
    index: int,
    module: nn.Module,
    linears: Mapping[str, nn.Linear],
    text: Text,
    folds: Folds,
    done: dict[str, tuple[QuantizedLinear, LayerResult]],
    reach: dict[str, float],
    largest: dict[str, torch.Tensor],
) -> None:
    """Quantize linears as the text reaches them (into `done`; `reach` is filled first), and bring it behind the block; folds are applied in between."""
    inputs = [job.room.keep(x.load().clone()) for x in text.quantized] if job.tuner is not None and isinstance(text, Streams) else []
    targets: dict[str, torch.Tensor] = {}
    weighing = job.outputs(index)
    stats: Stats | None = None
    passed: list[nn.Linear] = []
    for arrival in text.through(index, module, linears, folds):
        name = arrival.name
        if not done:  # folded, and nothing is quantized yet
            reach |= reaches(linears, job.schemes, corrected="cross" in job.needs)
        if not arrival.repeated and job.tuner is None:
            while passed:
                release(passed.pop())  # every batch that runs it has done so
        linear = linears[name]
        passed.append(linear)
        if not arrival.repeated or stats is None:
            stats = None  # before the next linear's come into being
            stats = _gathered(job, arrival.sums)
        if stats.absmax is not None and name in job.blocks.experts:
            largest[_kind(name)] = torch.maximum(stats.absmax, largest.get(_kind(name), stats.absmax))
        with job.room.clock.part("solve"):
            stats.outputs = folds.weighed(name, weighing[name].load()) if name in weighing else None
            if job.tuner is not None:
                targets[name] = linear.weight.detach()
            q, _ = done[name] = quantize_linear(name, linear.weight.detach(), job.schemes[name], job.quantizer, stats, job.options, reach.get(name, 0.0))
            arrival.put(q)
    if job.tuner is not None and isinstance(text, Streams) and text.original is not None:
        weighed = weighing.get(job.blocks.block_names[index])
        start = {name: q for name, (q, _) in done.items()}
        roundings = {name: rounding for name, q in start.items() if (rounding := numerics.input_rounding(q.scheme, q.input_scale)) is not None}
        block = TunedBlock(job.blocks, index, module, linears, start, targets, inputs, text.original, None if weighed is None else damped(weighed.load()), roundings)
        with job.room.clock.part("tune"):
            done |= tune(block, job.tuner, job.options, done, job.room, text.quantized)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _gathered(job: Job, sums: Callable[[], Sums]) -> Stats:
    with job.room.clock.part("statistics"):
        stats = sums().stats()
        stats.clock = job.room.clock
        return stats


def _head(job: Job, text: Text | None) -> Piece:
    name = job.blocks.head_name
    assert name is not None
    with job.room.clock.part("load"):
        weight = job.blocks.head_weight()
    stats = None if text is None else _gathered(job, functools.partial(text.head_sums, weight.shape[1]))
    with job.room.clock.part("solve"):
        q, layer = quantize_linear(name, weight, job.schemes[name], job.quantizer, stats, job.options)
    return Piece({name: q.to("cpu")}, [layer])
