"""The calibration text on its way through the model: hidden states of both streams, brought through one decoder block after the other.

Letters: B windows, T tokens, D hidden width, I input features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.lockstep import Stop, lockstep
from qforge.calibration.originals import Originals
from qforge.calibration.precision import fast_products
from qforge.calibration.replay import finished_block
from qforge.calibration.room import Kept, Room
from qforge.calibration.statistics import Sums, difference
from qforge.calibration.store import Hidden, Piece
from qforge.calibration.transforms import Folds
from qforge.calibration.tuning import step_rows
from qforge.models.blocks import BlockModel
from qforge.models.link_search import PROBE
from qforge.models.links import Link
from qforge.models.residuals import find_residuals
from qforge.models.sharing import find_followers
from qforge.qlinear import QuantizedLinear

BATCH_TOKENS = 1024  # enough for matrix products at full speed; more, and what an operation leaves is gone from the caches before the next one reads it


@dataclass(frozen=True, slots=True)
class Arrival:
    """The quantized stream has reached a linear.

    Attributes:
        name: of the linear.
        repeated: whether its inputs are those of the arrival before (query, key and value projections); batches may not have run that one yet.
        sums: over its inputs, to be asked for at most once.
        put: has the stream go on through the quantized linear.
    """

    name: str
    repeated: bool
    sums: Callable[[], Sums]
    put: Callable[[QuantizedLinear], None]


class Text(Protocol):
    """What the block loop asks of the calibration text.

    Attributes:
        probe: the first block's inputs for a few tokens `[1, T, D]`, to find links with.
    """

    probe: torch.Tensor

    def enter(self, windows: torch.Tensor, found: Hidden | None) -> None:
        """Begin with token ids `[B, T]`, before the first block or with the hidden states that were found."""

    def replay(self, index: int, piece: Piece) -> None:
        """Go through a finished block."""

    def fold_sums(self, index: int, module: nn.Module, links: Sequence[Link], needs: frozenset[str]) -> list[Sums]:
        """Sums over what each link's readers are fed by a materialised block, which the text does not leave behind."""

    def through(self, index: int, module: nn.Module, linears: Mapping[str, nn.Linear], folds: Folds) -> Iterator[Arrival]:
        """Go through a materialised block, which is folded first, linear by linear."""

    def head_sums(self, in_features: int) -> Sums:
        """Sums over what the output head takes."""

    def hidden(self) -> Hidden:
        """Where it is, to be kept."""


class Streams:
    """The text, or one part of it, in this process (`Text`).

    Args:
        blocks: the merged model.
        room: keeps activations.
        needs: statistics to gather.
        tuned: blocks are also run on the parts of a batch that gradients are taken of.
        first: how many tokens are in the parts before this one.

    Attributes:
        quantized: hidden states `[B, T, D]` fp32 as the quantized model has them, batch by batch.
        original: as the unquantized model has them; None where the method does not ask.
    """

    def __init__(self, blocks: BlockModel, room: Room, needs: frozenset[str], *, tuned: bool = False, first: int = 0) -> None:
        self._blocks, self._room, self._needs, self._tuned, self._first = blocks, room, needs, tuned, first
        self.quantized: list[Kept] = []
        self.original: list[Kept] | None = None if needs.isdisjoint({"cross", "targets"}) else []
        self.probe = torch.empty(0)

    def enter(self, windows: torch.Tensor, found: Hidden | None) -> None:
        """See `Text.enter`."""
        batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
        steps = [b[rows] for b in (batches[0], batches[-1]) for rows in step_rows(*b.shape)] if self._tuned else []
        for _ in self._blocks.embed(steps):
            pass
        for embedded in self._blocks.embed([windows[:1, :PROBE], *batches]):  # also records what blocks are called with
            if not self.probe.numel():
                self.probe = embedded
            elif found is None:
                self._add(embedded, embedded)
        if found is not None:
            with torch.device("cpu"):
                for i in range(len(batches)):
                    self._add(found[f"quantized.{i}"].load(), found[f"original.{i}"].load() if self.original is not None else None)

    def replay(self, index: int, piece: Piece) -> None:
        """See `Text.replay`: all batches of both streams, in place."""
        with finished_block(self._blocks, index, piece) as module:
            self._advance(index, module, self.quantized)
        if self.original is not None:
            with self._blocks.block(index) as module, fast_products(module):
                self._advance(index, module, self.original)

    def fold_sums(self, index: int, module: nn.Module, links: Sequence[Link], needs: frozenset[str]) -> list[Sums]:
        """See `Text.fold_sums`."""
        sums = [Sums(needs, len(link.columns), self._first) for link in links]
        readers = [module.get_submodule(link.readers[0]) for link in links]
        handles = [m.register_forward_pre_hook(lambda _, args, s=s: s.add(args[0])) for m, s in zip(readers, sums, strict=True)]
        try:
            with fast_products(module):
                for batch in self.quantized:
                    self._blocks.run(index, module, batch.load())
        finally:
            for handle in handles:
                handle.remove()
        return sums

    def through(self, index: int, module: nn.Module, linears: Mapping[str, nn.Linear], folds: Folds) -> Iterator[Arrival]:
        """See `Text.through`; in the end both streams are behind the block."""

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return self._blocks.run(index, module, hidden)

        corrects = "cross" in self._needs
        residuals = find_residuals(module, run, self.probe) if corrects else {}
        taps = {name: module.get_submodule(name) for name in dict.fromkeys(residuals.values())}
        originals = None if self.original is None else Originals(self._room, run, linears if corrects else {}, taps, self.original, folds)
        folds.apply(module)
        lacking: dict[str, dict[int, Kept]] = {name: {} for name in taps}  # in the residual stream, by batch
        added = {name: lacking[residuals[own]] for own, m in module.named_modules() if own in residuals for name, linear in linears.items() if m is linear}
        outputs: list[Kept] = []
        roundings: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}

        def compare(tap: str, batch: int, x: torch.Tensor) -> None:
            wanted = None if originals is None else originals.take(tap, batch, x, None)
            assert wanted is not None
            lacking[tap][batch] = self._room.copy(difference(wanted, x))

        followers = find_followers(linears, run, self.probe)
        behind = frozenset(name for names in followers.values() for name in names)
        for stop in lockstep(linears, run, self.quantized, outputs, self._room, roundings, taps, behind, compare):
            sums = functools.partial(self._sums, stop, linears[stop.name], originals, added.get(stop.name, {}))
            for name in (stop.name, *followers.get(stop.name, ())):
                yield Arrival(name, stop.repeated or name != stop.name, sums, functools.partial(_put, name, linears[name], roundings))
        self.quantized[:] = outputs

    def head_sums(self, in_features: int) -> Sums:
        """See `Text.head_sums`."""
        sums = Sums(self._needs, in_features, self._first)
        originals = [self._room.copy(x) for x in self._blocks.head_inputs(h.load() for h in self.original or [])]
        for i, x in enumerate(self._blocks.head_inputs(h.load() for h in self.quantized)):
            sums.add(x, originals[i].load() if originals else None)
        return sums

    def hidden(self) -> Hidden:
        """See `Text.hidden`."""
        named = {f"quantized.{i}": h for i, h in enumerate(self.quantized)}
        return named | {f"original.{i}": h for i, h in enumerate(self.original or [])}

    def _add(self, quantized: torch.Tensor, original: torch.Tensor | None) -> None:
        self.quantized.append(self._room.keep(quantized))
        if self.original is not None and original is not None:
            self.original.append(self._room.keep(original))

    def _advance(self, index: int, module: nn.Module, hidden: list[Kept]) -> None:
        for i, batch in enumerate(hidden):
            out = self._blocks.run(index, module, batch.load())
            batch.free()
            hidden[i] = self._room.keep(out)

    def _sums(self, stop: Stop, linear: nn.Linear, originals: Originals | None, lacking: dict[int, Kept]) -> Sums:
        """Over what all batches that wait will feed a linear."""
        sums = Sums(self._needs, linear.in_features, self._first, linear.out_features if lacking else 0)
        for batch, x, rows in zip(stop.batches, stop.inputs(), stop.rows, strict=True):
            sums.add(x, None if originals is None else originals.take(stop.name, batch, x, rows), lacking[batch].load() if lacking else None)
        lacking.clear()
        return sums


def _put(name: str, linear: nn.Linear, roundings: dict[str, Callable[[torch.Tensor], torch.Tensor]], q: QuantizedLinear) -> None:
    linear.weight = nn.Parameter(numerics.dequantize(q), requires_grad=False)
    rounding = numerics.input_rounding(q.scheme, q.input_scale)
    if rounding is not None:
        roundings[name] = rounding
