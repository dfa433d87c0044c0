"""The resume journal: finished pieces of work under content-addressed names. What is found under a key is exactly what computing it would give.

A piece is a safetensors file (tensors) with a JSON text in its metadata; it is written to a temporary name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from qforge import __version__
from qforge.calibration.store import Held, Hidden
from qforge.errors import ModelError, OutputError
from qforge.export.writer import Piece, write_file
from qforge.methods import native
from qforge.models.shards import Shards
from qforge.models.weights import TensorInfo

_DAMAGED = (SafetensorError, KeyError, ValueError)  # what the system refuses may pass, and the piece is whole


def key(stage: str, **parts: Any) -> str:
    """The name of a piece: the stage and a hash over everything that decides its content, our version, those of torch and transformers, threads and instruction set."""
    text = json.dumps({"stage": stage, "parts": parts, "machine": {**machine(), "threads": torch.get_num_threads()}}, sort_keys=True, default=str)
    return f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def machine() -> dict[str, Any]:
    """What bits depend on beside inputs and threads."""
    versions = {"qforge": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "isa": [torch.backends.cpu.get_cpu_capability(), native.has_bf16_products(), native.has_bf16_tiles()]}


class Journal:
    """Pieces in one folder, and how many of them this run computed or found. `before_save` is called before a piece appears."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.computed = 0
        self.before_save: Callable[[], None] = lambda: None
        self._found: set[str] = set()

    @property
    def resumed(self) -> int:
        """Pieces of earlier runs that this run took up."""
        return len(self._found)

    def load(self, name: str, *, count: bool = True) -> tuple[dict[str, torch.Tensor], Any] | None:
        """Tensors and JSON value of a piece, or None. A damaged file counts as absent, and is removed.

        Raises:
            OutputError: the system does not let it be read.
        """
        if not self.has(name):
            return None
        try:
            with _opened(self._path(name)) as f:
                value = json.loads((f.metadata() or {})["json"])
                tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118  # not a dict
        except _DAMAGED:
            self.forget(name)
            return None
        if count:
            self._found.add(name)
        return tensors, value

    def value(self, name: str) -> Any:
        """The JSON value alone of a piece that is there. Raises as `load`."""
        with _opened(self._path(name)) as f:
            return json.loads(f.metadata()["json"])

    def stored(self, name: str) -> Hidden | None:
        """The tensors of a piece, read one by one when they are wanted, or None. Damaged files and errors as for `load`."""
        if not self.has(name):
            return None
        try:
            shards = Shards([self._path(name)])
        except ModelError as e:
            if isinstance(e.__cause__, OSError):
                raise _unread(self._path(name), e.__cause__) from e
            self.forget(name)
            return None
        return {n: _Stored(shards, n) for n in shards.names()}

    def save(self, name: str, tensors: Mapping[str, torch.Tensor | Held], value: Any, *, count: bool = True) -> None:
        """Keep a piece; tensors that are read when they are wanted are in memory one at a time.

        Raises:
            OutputError: the disk is full or cannot be written.
        """
        self.before_save()
        write_file(self._path(name), [_written(n, t) for n, t in tensors.items()], {"json": json.dumps(value)})
        self.computed += count

    def has(self, name: str) -> bool:
        """Whether a piece is there (it may still turn out damaged). Raises OutputError: the system does not say."""
        with _reading(self._path(name)):
            return self._path(name).exists()

    def forget(self, name: str) -> None:
        """Remove a piece."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _unread(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot read {path}, which a run has kept: {error.strerror or error}; put that right and run the same command again")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _unread(path, e) from e


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with _reading(path):
        with open(path, "rb"):
            pass  # whatever the system says, safetensors finds no such file
        with safe_open(path, "pt") as f:
            yield f


class _Stored:
    """One tensor of a piece (`Held`)."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards, self._name = shards, name
        info = shards.info(name)
        self.shape, self.dtype = torch.Size(info.shape), info.dtype

    def load(self) -> torch.Tensor:
        """Read the tensor."""
        return self._shards.read(self._name)


def _written(name: str, tensor: torch.Tensor | Held) -> Piece:
    def read() -> dict[str, torch.Tensor]:
        return {name: tensor if isinstance(tensor, torch.Tensor) else tensor.load()}

    return Piece({name: TensorInfo(tuple(tensor.shape), tensor.dtype)}, read)
