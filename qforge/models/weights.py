"""Tensors by Hugging Face name, read on demand: the protocol that every source of weights follows, and the view that gives them one dtype."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_MOST_ELEMENTS = 1 << 48
MOST_DIMENSIONS = 8  # of a weight


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def sized(shape: Sequence[int]) -> bool:
    """Whether sizes of tensors of this shape can be computed with: where one dimension is 0, as tensors without elements have it, the others could be anything."""
    return math.prod(max(n, 1) for n in shape) < _MOST_ELEMENTS


class WeightSource(Protocol):
    """Where weights come from. Reading one tensor holds memory for that tensor only."""

    def names(self) -> list[str]:
        """All tensor names, in the order of the file."""

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of what `read` gives; KeyError for an unknown name."""

    def read(self, name: str) -> torch.Tensor:
        """A fresh CPU tensor; KeyError for an unknown name, ModelError when the file cannot be read."""

    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that decides the values."""


class Cast:
    """Another source's tensors, floats converted to one dtype (integers, and the names in `keep`, as they are)."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
        self.source = source
        self.dtype = dtype
        self._keep = frozenset(keep)

    def names(self) -> list[str]:
        """The source's names."""
        return self.source.names()

    def info(self, name: str) -> TensorInfo:
        """The source's shape, and the dtype after conversion."""
        stored = self.source.info(name)
        return TensorInfo(stored.shape, self.dtype if stored.dtype.is_floating_point and name not in self._keep else stored.dtype)

    def read(self, name: str) -> torch.Tensor:
        """The source's tensor in the dtype of `info`."""
        return self.source.read(name).to(self.info(name).dtype)

    def fingerprint(self) -> str:
        """Of the source and the dtype."""
        return digest("cast", self.source.fingerprint(), str(self.dtype), *sorted(self._keep))


class Renamed:
    """Another source's tensors under other names; tensors without a new name are hidden."""

    def __init__(self, source: WeightSource, names: dict[str, str]) -> None:
        self.source = source
        self._names = names  # ours -> the source's

    def names(self) -> list[str]:
        """Our names."""
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        """As the source says."""
        return self.source.info(self._names[name])

    def read(self, name: str) -> torch.Tensor:
        """As the source gives it."""
        return self.source.read(self._names[name])

    def fingerprint(self) -> str:
        """Of the source and the names."""
        return digest("renamed", self.source.fingerprint(), *(f"{a}={b}" for a, b in self._names.items()))


def digest(*parts: str) -> str:
    """Hex SHA-256 over strings, their boundaries included."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


def listed(items: Iterable[str], most: int = 3) -> str:
    """The first few of many names, for a message: `a, b, c and 7 more`."""
    names = list(items)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
