"""What a call that waits has left behind - every tensor that its frames still hold - lies in a file until an operation wants it.

A call stack of somebody else's modelling code cannot be asked for its tensors. But every operation passes a dispatch mode of PyTorch: it sees which
storages come into being, and, before an operation runs, which ones it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qforge.calibration.room import Room

SMALLEST = 1 << 16  # bytes; what is smaller stays in memory


class _Lot:
    """One storage that a call made: the tensors that share it, and where its bytes are."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.size = 0
        self.in_memory = False  # counted in the room's budget
        self.place: int | None = None
        self.changed = False  # since it was written

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, None once no tensor has it any more."""
        self.tensors = [ref for ref in self.tensors if ref() is not None]
        tensor = self.tensors[0]() if self.tensors else None
        return None if tensor is None else tensor.untyped_storage()


class Parking(TorchDispatchMode):
    """The storages of one call. Active while the call runs; `rest` and `wake` in between.

    Only storages that come into being in the call are its own: what it shares with others (weights, positions, masks) is left alone. What it made
    and the block's code kept is brought back for other calls, too.
    """

    def __init__(self, room: Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = room
        self._lots: dict[int, _Lot] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs = [*_tensors(args), *_tensors(tuple((kwargs or {}).values()))]
        for tensor in inputs:
            self.wake(tensor, changes=func._schema.is_mutable)
        result = func(*args, **(kwargs or {}))
        shared = {tensor.untyped_storage()._cdata for tensor in inputs} - self._lots.keys()
        for tensor in _tensors((result,)):
            if tensor.untyped_storage()._cdata not in shared:
                self.own(tensor)
        return result

    def own(self, tensor: torch.Tensor) -> None:
        """A tensor that belongs to the call alone; one on a card stays there."""
        if tensor.device.type != "cpu":
            return
        key = tensor.untyped_storage()._cdata
        lot = self._lots.get(key)
        if lot is not None and lot.storage() is None:  # a new storage where a dead one was
            self._forget(key)
            lot = None
        if lot is None:
            lot = self._lots[key] = _Lot()
        lot.tensors.append(weakref.ref(tensor))

    def wake(self, tensor: torch.Tensor, *, changes: bool = False) -> None:
        """Bring a tensor's values back, if they are away; `changes`: they may be written to."""
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        lot = self._lots.get(storage._cdata)
        if lot is None:
            owner = self._room.filed.get(storage._cdata)
            if owner is not None and tensor.numel() > 0:  # made in another call, and kept by the block's code
                owner.wake(tensor, changes=changes)
            return
        lot.changed |= changes
        if lot.place is not None and storage.nbytes() == 0:
            assert self._room.spill is not None
            storage.resize_(lot.size)
            with self._room.clock.part("spill"):
                self._room.spill.read(lot.place, storage.data_ptr(), lot.size)

    def rest(self) -> None:
        """The call waits: let go of what is dead, and of the memory of what does not fit into the room's budget."""
        for key, lot in list(self._lots.items()):
            storage = lot.storage()
            if storage is None:
                self._forget(key)
            elif storage.nbytes() >= SMALLEST and not lot.in_memory:
                self._put_away(lot, storage)

    def leave(self) -> None:
        """The call is over: what is left of it belongs to others now."""
        for key, lot in list(self._lots.items()):
            if lot.storage() is not None and (kept := lot.tensors[0]()) is not None:
                self.wake(kept)
            self._forget(key)

    def _put_away(self, lot: _Lot, storage: torch.UntypedStorage) -> None:
        lot.size = storage.nbytes()
        if lot.place is None and (self._room.spill is None or self._room.fits(lot.size)):
            lot.in_memory = True
            self._room.used += lot.size
            return
        assert self._room.spill is not None
        with self._room.clock.part("spill"):
            if lot.place is None:
                lot.place = self._room.spill.write(storage.data_ptr(), lot.size)
            elif lot.changed:
                self._room.spill.rewrite(lot.place, storage.data_ptr(), lot.size)
        lot.changed = False
        storage.resize_(0)
        self._room.filed[storage._cdata] = self

    def _forget(self, key: int) -> None:
        lot = self._lots.pop(key)
        if self._room.filed.get(key) is self:
            del self._room.filed[key]
        if lot.in_memory:
            self._room.used -= lot.size
        elif lot.place is not None:
            assert self._room.spill is not None
            self._room.spill.free(lot.place, lot.size)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operation's arguments or results, which nest lists at most; those on a card stay there."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
