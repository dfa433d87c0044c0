"""Many batches through one decoder block, held together at every linear: it can be quantized from all its inputs before any batch goes on through it.

Each batch runs the block's own forward in a greenlet, a call stack that can be left in the middle and taken up again, so every linear is computed once,
with its quantized weight, and this code knows no model family.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import greenlet
import torch
from torch import nn

from qforge.calibration.parking import Parking
from qforge.calibration.room import Kept, Room
from qforge.errors import UnsupportedError
from qforge.models.experts import routed_rows

Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stop:
    """All batches wait at a linear.

    Attributes:
        name: of the linear.
        repeated: whether its inputs are those of the stop before (query, key and value projections).
        batches: which batches wait here; the others never run this linear (an expert that they do not use).
        inputs: the inputs `[B, T, I]` of these batches, one after the other; `[R, I]` in an expert.
        rows: in an expert, which tokens of each of these batches its inputs belong to (`experts.routed_rows`).
    """

    name: str
    repeated: bool
    batches: tuple[int, ...]
    inputs: Callable[[], Iterator[torch.Tensor]]
    rows: tuple[torch.Tensor | None, ...]


def lockstep(
    linears: Mapping[str, nn.Linear],
    run: Run,
    batches: Sequence[Kept],
    outputs: list[Kept],
    room: Room,
    rounding: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    passed: Mapping[str, nn.Module] = MappingProxyType({}),
    followers: frozenset[str] = frozenset(),
    seen: Callable[[str, int, torch.Tensor], None] = lambda name, batch, x: None,
) -> Iterator[Stop]:
    """Run a block on all batches, yielding at every linear but the followers, in the order of `linears`; between two yields its weight, and its followers', may be replaced.

    Args:
        linears: those to stop at, by name, in the order in which the block calls them.
        run: the block's forward, `[B, T, D] -> [B, T, D]`.
        batches: its inputs, freed once they are taken up.
        outputs: filled with what the block returns, in the order of `batches`.
        room: keeps waiting inputs and outputs.
        rounding: what a linear does to its input first, by name; may be added to between two yields.
        passed: submodules where nobody waits, by name.
        followers: linears where nobody waits, either: they take what the one before them took (`sharing.find_followers`).
        seen: told of what each of those takes, with its name and the number of the batch.
    """
    order = {name: place for place, name in enumerate(linears)}
    handles = [module.register_forward_pre_hook(_waits(name, rounding)) for name, module in {**passed, **linears}.items()]
    try:
        flights = [_Flight(run, batch, room, {name: functools.partial(seen, name, i) for name in passed}, followers) for i, batch in enumerate(batches)]
        for flight in flights:
            flight.go()
        before: dict[int, weakref.ref[torch.Tensor]] = {}
        while waiting := [i for i, f in enumerate(flights) if f.at is not None]:
            name = min((at for i in waiting if (at := flights[i].at) is not None), key=order.__getitem__)
            here = tuple(i for i in waiting if flights[i].at == name)
            inputs = {i: weakref.ref(flights[i].held()) for i in here}
            repeated = inputs.keys() == before.keys() and all(inputs[i]() is before[i]() for i in here)
            yield Stop(name, repeated, here, functools.partial(_inputs, [flights[i] for i in here]), tuple(flights[i].rows for i in here))
            before = inputs
            for i in here:
                flights[i].go()
        outputs.extend(f.output() for f in flights)
    finally:
        for handle in handles:
            handle.remove()


def _inputs(flights: Sequence[_Flight]) -> Iterator[torch.Tensor]:
    for flight in flights:
        yield flight.input()
        flight.rest()


def _waits(name: str, rounding: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        parent = greenlet.getcurrent().parent
        assert parent is not None
        parent.switch(name, args[0], routed_rows())
        return (rounding[name](args[0]), *args[1:]) if name in rounding else args

    return hook


class _Flight:
    """One batch on its way through the block. While it waits, what its frames hold may lie on disk, in tensors without memory."""

    def __init__(self, run: Run, batch: Kept, room: Room, passed: Mapping[str, Callable[[torch.Tensor], None]], followers: frozenset[str]) -> None:
        self._room = room
        self._batch: Kept | None = batch
        self._passed, self._followers = passed, followers
        self._stack = greenlet.greenlet(run)
        self._parking = Parking(room)
        self._gradients = torch.is_grad_enabled()  # in the call, which may turn them off and on; the thread has one mode for all calls
        self._held: torch.Tensor | None = None
        self._done: Kept | None = None
        self.at: str | None = None
        self.rows: torch.Tensor | None = None

    def go(self) -> None:
        """On to the next linear, or to the end."""
        taken, self._held = self._held, None
        arrived = self._start() if self._batch is not None else self._switch()
        while not self._stack.dead:
            if arrived[0] in self._followers:
                if arrived[1] is not taken:
                    said = "took what the linear before it takes when it was tried with a few tokens, and takes something else now"
                    raise UnsupportedError(f"{arrived[0]} {said}; add it to quantize.ignore")
            elif arrived[0] in self._passed:
                self._passed[arrived[0]](arrived[1])
            else:
                break
            arrived = self._switch()
        del taken
        if self._stack.dead:
            self._parking.leave()
            self.at, self._done = None, self._room.keep(arrived)
            return
        self.at, self._held, self.rows = arrived
        self.rest()

    def _start(self) -> Any:
        assert self._batch is not None
        start = self._batch.load()
        if not start.untyped_storage().resizable():  # what has been written to a file cannot be put away
            start = start.clone()
        self._batch.free()
        self._batch = None
        self._parking.own(start)
        return self._switch(start)

    def _switch(self, *args: torch.Tensor) -> Any:
        outside = torch.is_grad_enabled()
        torch.set_grad_enabled(self._gradients)
        try:
            with self._parking:
                return self._stack.switch(*args)
        finally:
            self._gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(outside)

    def held(self) -> torch.Tensor:
        """The tensor that waits, possibly without its values: for identity only."""
        assert self._held is not None
        return self._held

    def input(self) -> torch.Tensor:
        """The tensor that waits, with its values."""
        held = self.held()
        self._parking.wake(held)
        return held

    def rest(self) -> None:
        """Give the memory back of what lies on disk."""
        self._parking.rest()

    def output(self) -> Kept:
        """What the block returned."""
        assert self._done is not None
        return self._done
