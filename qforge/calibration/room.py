"""Memory for activations up to a budget; what does not fit lies in unnamed files until it is wanted."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import IO

import torch

from qforge.files import readable_errors

BUDGET = 64 << 20  # bytes in memory where a recipe sets no limit: files are read back at several GB/s from the page cache


class Room:
    """Keeps tensors. The operating system removes the files, however the process ends.

    Args:
        folder: where files go; None keeps everything in memory.
        budget: bytes that may lie in memory.
    """

    def __init__(self, folder: Path | None = None, budget: int = BUDGET) -> None:
        self._folder, self._budget = folder, budget
        self.used = 0

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor (not a copy, where it stays in memory).

        Raises:
            OutputError: the disk is full.
        """
        size = tensor.numel() * tensor.element_size()
        if self._folder is None or self.used + size <= self._budget:
            self.used += size
            return Kept(self, tensor, None, tensor.dtype, tensor.shape)
        with readable_errors(self._folder):
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # closed by Kept.free
            whole = tensor.detach().contiguous()
            file.write(_bytes(whole))
            file.flush()
        return Kept(self, None, file, tensor.dtype, tensor.shape)

    def copy(self, tensor: torch.Tensor) -> Kept:
        """As `keep`, in half precision: fp16, or bf16 where a value is too large for it."""
        return self.keep(tensor.half() if float(tensor.abs().max()) < torch.finfo(torch.float16).max else tensor.bfloat16())


class Kept:
    """One tensor that a `Room` keeps."""

    def __init__(self, room: Room, tensor: torch.Tensor | None, file: IO[bytes] | None, dtype: torch.dtype, shape: torch.Size) -> None:
        self._room, self._tensor, self._file, self._dtype = room, tensor, file, dtype
        self.shape = shape

    @property
    def on_disk(self) -> bool:
        """Whether it lies in a file."""
        return self._file is not None

    def load(self) -> torch.Tensor:
        """The tensor: itself where it is in memory, else read from its file."""
        return self._tensor if self._tensor is not None else self.read_into(torch.empty(self.shape, dtype=self._dtype))

    def read_into(self, target: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous tensor of the same shape and dtype from the file."""
        assert self._file is not None
        self._file.seek(0)
        count = self._file.readinto(_bytes(target))  # type: ignore[attr-defined]  # a buffered binary file
        assert count == target.numel() * target.element_size()
        return target

    def free(self) -> None:
        """Forget it."""
        if self._tensor is not None:
            self._room.used -= self._tensor.numel() * self._tensor.element_size()
            self._tensor = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.free()


def _bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """A contiguous tensor's memory. (A numpy view would do, but makes the storage one that cannot be resized.)"""
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
