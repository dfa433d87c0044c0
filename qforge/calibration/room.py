"""Memory for activations up to a budget; what does not fit lies in a file until it is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from qforge.calibration.spill import Spill
from qforge.clock import Clock

BUDGET = 64 << 20  # bytes in memory where a recipe sets no limit: the file is read back at several GB/s from the page cache


class Wakes(Protocol):
    """Brings values back (`Parking`)."""

    def wake(self, tensor: torch.Tensor, *, changes: bool = False) -> None:
        """Of this tensor, if they are away."""


class Room:
    """Keeps tensors, and what calls that wait have left behind.

    Args:
        folder: where the file goes; None keeps everything in memory.
        budget: bytes that may lie in memory.
        clock: is told what the file took.
    """

    def __init__(self, folder: Path | None = None, budget: int = BUDGET, clock: Clock | None = None) -> None:
        self.spill = None if folder is None else Spill(folder)
        self.clock = clock or Clock()
        self.filed: dict[int, Wakes] = {}  # whose storages (by address) the file has
        self._budget = budget
        self.used = 0

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor in the processor's memory or in the file (not a copy, where it stays in memory).

        Raises:
            OutputError: the disk is full.
        """
        tensor = tensor.cpu()
        size = tensor.numel() * tensor.element_size()
        if self.spill is None or self.fits(size):
            self.used += size
            return Kept(self, tensor, 0, tensor.dtype, tensor.shape)
        whole = tensor.detach().contiguous()
        with self.clock.part("spill"):
            return Kept(self, None, self.spill.write(whole.data_ptr(), size), tensor.dtype, tensor.shape)

    def copy(self, tensor: torch.Tensor) -> Kept:
        """As `keep`, in half precision: fp16, or bf16 where a value is too large for it."""
        return self.keep(tensor.half() if float(tensor.abs().max()) < torch.finfo(torch.float16).max else tensor.bfloat16())

    def fits(self, size: int) -> bool:
        """Whether so many bytes more may lie in memory."""
        return self.used + size <= self._budget


class Kept:
    """One tensor that a `Room` keeps."""

    def __init__(self, room: Room, tensor: torch.Tensor | None, place: int, dtype: torch.dtype, shape: torch.Size) -> None:
        self._room, self._tensor, self._place = room, tensor, place
        self._freed = False
        self.dtype, self.shape = dtype, shape
        self._size = shape.numel() * dtype.itemsize

    def load(self) -> torch.Tensor:
        """The tensor on the device where tensors come into being: itself where it is in memory there, else a copy."""
        if self._tensor is not None:
            return self._tensor.to(torch.get_default_device())
        assert not self._freed
        assert self._room.spill is not None
        target = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        with self._room.clock.part("spill"):
            self._room.spill.read(self._place, target.data_ptr(), self._size)
        return target.to(torch.get_default_device())

    def free(self) -> None:
        """Forget the tensor, and give its memory or its place in the file back."""
        if self._freed:
            return
        self._freed = True
        if self._tensor is not None:
            self._room.used -= self._size
            self._tensor = None
        elif self._room.spill is not None:
            self._room.spill.free(self._place, self._size)

    def __del__(self) -> None:
        self.free()
