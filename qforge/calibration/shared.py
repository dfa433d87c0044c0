"""The calibration text shared among workers: each brings its part through the blocks, and what they sum is added in their order.

Which processes the workers are, and how they are reached, is not known here.

Letters: B windows, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from qforge.calibration.precision import fast_products
from qforge.calibration.room import Room
from qforge.calibration.statistics import Sums
from qforge.calibration.store import Held, Hidden, Piece
from qforge.calibration.streams import Arrival, Streams
from qforge.calibration.transforms import Folds
from qforge.models.blocks import BlockModel, release
from qforge.models.link_search import PROBE
from qforge.models.links import Link
from qforge.qlinear import QuantizedLinear


class Worker(Protocol):
    """Another process with the same model, and a part of the text there."""

    def start(self, task: str, *arguments: Any) -> Callable[[], Any]:
        """Have a method of its `Part` called, after those before; what is returned waits for what that returns."""


class Part:
    """One worker's part of the text, in the worker's process.

    Args:
        blocks: the merged model.
        room: keeps activations.
    """

    def __init__(self, blocks: BlockModel, room: Room) -> None:
        self._blocks, self._room = blocks, room
        self._open = contextlib.ExitStack()
        self._module: nn.Module | None = None
        self._arrivals: Iterator[Arrival] = iter(())
        self._arrival: Arrival | None = None
        self._passed: list[nn.Module] = []
        self._found: dict[str, Held] = {}

    def give(self, name: str, hidden: torch.Tensor) -> None:
        """Hidden states to begin with."""
        self._found[name] = self._room.keep(hidden)

    def enter(self, windows: torch.Tensor, first: int, needs: frozenset[str]) -> None:
        """See `Text.enter`: with what was given before, if anything was; `first` tokens are in the parts before this one."""
        self._streams = Streams(self._blocks, self._room, needs, first=first)
        self._streams.enter(windows, self._found or None)
        self._found.clear()

    def replay(self, index: int, piece: Piece) -> None:
        """See `Text.replay`."""
        self._streams.replay(index, piece)

    def fold_sums(self, index: int, links: Sequence[Link], needs: frozenset[str]) -> list[Sums]:
        """See `Text.fold_sums`."""
        return self._streams.fold_sums(index, self._opened(index), links, needs)

    def begin(self, index: int, names: Sequence[str], folds: Folds) -> tuple[str, bool] | None:
        """Go into a block; the linear among `names` that is reached, and whether its inputs are those of the one before."""
        module, linears = self._opened(index), self._blocks.linears(index)
        self._open.enter_context(fast_products(module))
        self._arrivals = self._streams.through(index, module, {n: linears[n] for n in names}, folds)
        return self._next()

    def sums(self) -> Sums:
        """Over the inputs of the linear that is reached."""
        assert self._arrival is not None
        return self._arrival.sums()

    def put(self, index: int, q: QuantizedLinear) -> tuple[str, bool] | None:
        """Go on through the quantized linear; as `begin`, None behind the block."""
        assert self._arrival is not None
        self._arrival.put(q)
        self._passed.append(self._blocks.linears(index)[self._arrival.name])
        following = self._next()
        if following is None or not following[1]:
            while self._passed:
                release(self._passed.pop())  # every batch that runs it has done so
        return following

    def head_sums(self, in_features: int) -> Sums:
        """See `Text.head_sums`."""
        return self._streams.head_sums(in_features)

    def shapes(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Of the hidden states, by name."""
        return {name: (h.dtype, h.shape) for name, h in self._streams.hidden().items()}

    def hidden(self, name: str) -> torch.Tensor:
        """Hidden states by name."""
        return self._streams.hidden()[name].load()

    def _opened(self, index: int) -> nn.Module:
        if self._module is None:
            self._module = self._open.enter_context(self._blocks.block(index))
        return self._module

    def _next(self) -> tuple[str, bool] | None:
        self._arrival = next(self._arrivals, None)
        if self._arrival is None:
            self._open.close()
            self._module = None
            return None
        return self._arrival.name, self._arrival.repeated


class SharedText:
    """The text in several workers (`Text`): contiguous parts, so that the same number of workers gives the same bytes.

    Args:
        blocks: the merged model.
        workers: at most as many as the text has windows.
        needs: statistics to gather.
    """

    def __init__(self, blocks: BlockModel, workers: Sequence[Worker], needs: frozenset[str]) -> None:
        self._blocks, self._workers, self._needs = blocks, workers, needs
        self.probe = torch.empty(0)

    def enter(self, windows: torch.Tensor, found: Hidden | None) -> None:
        """See `Text.enter`."""
        (self.probe,) = self._blocks.embed([windows[:1, :PROBE]])
        for name, held in (found or {}).items():
            number, _, own = name.partition(".")
            self._workers[int(number)].start("give", own, held.load())()
        parts, first, started = windows.tensor_split(len(self._workers)), 0, []
        for worker, part in zip(self._workers, parts, strict=True):
            started.append(worker.start("enter", part.clone(), first, self._needs))
            first += part.numel()
        _all(started)

    def replay(self, index: int, piece: Piece) -> None:
        """See `Text.replay`."""
        self._ask("replay", index, piece)

    def fold_sums(self, index: int, module: nn.Module, links: Sequence[Link], needs: frozenset[str]) -> list[Sums]:
        """See `Text.fold_sums`."""
        return [_merged(iter(of_link)) for of_link in zip(*self._ask("fold_sums", index, links, needs), strict=True)]

    def through(self, index: int, module: nn.Module, linears: Mapping[str, nn.Linear], folds: Folds) -> Iterator[Arrival]:
        """See `Text.through`. Where workers have reached different linears (experts that not every part uses), the first of these is next."""
        order = {name: place for place, name in enumerate(linears)}
        reached: list[tuple[str, bool] | None] = self._ask("begin", index, list(linears), folds)
        folds.apply(module)
        before: list[int] = []
        while at := [place for place in reached if place is not None]:
            name = min((n for n, _ in at), key=order.__getitem__)
            here = [i for i, place in enumerate(reached) if place is not None and place[0] == name]
            repeated = here == before and all(place is not None and place[1] for place in (reached[i] for i in here))
            quantized: list[QuantizedLinear] = []
            yield Arrival(name, repeated, functools.partial(self._sums, here), quantized.append)
            started = [self._workers[i].start("put", index, quantized[0]) for i in here]
            for i, place in zip(here, _all(started), strict=True):
                reached[i] = place
            before = here

    def head_sums(self, in_features: int) -> Sums:
        """See `Text.head_sums`."""
        return _merged(wait() for wait in [w.start("head_sums", in_features) for w in self._workers])

    def hidden(self) -> Hidden:
        """See `Text.hidden`; read from the workers one by one."""
        return {f"{i}.{n}": _There(self._workers[i], n, *kind) for i, shapes in enumerate(self._ask("shapes")) for n, kind in shapes.items()}

    def _sums(self, here: Sequence[int]) -> Sums:
        return _merged(wait() for wait in [self._workers[i].start("sums") for i in here])

    def _ask(self, task: str, *arguments: Any) -> list[Any]:
        return _all([worker.start(task, *arguments) for worker in self._workers])


class _There:
    """Hidden states in a worker (`Held`)."""

    def __init__(self, worker: Worker, name: str, dtype: torch.dtype, shape: torch.Size) -> None:
        self._worker, self._name = worker, name
        self.dtype, self.shape = dtype, shape

    def load(self) -> torch.Tensor:
        """Fetch the hidden states from the worker."""
        found: torch.Tensor = self._worker.start("hidden", self._name)()
        return found


def _all(started: Sequence[Callable[[], Any]]) -> list[Any]:
    return [wait() for wait in started]


def _merged(parts: Iterator[Sums]) -> Sums:
    total = next(parts)
    for part in parts:
        total.merge(part)
    return total
