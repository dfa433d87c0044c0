"""The resume journal: finished pieces of work under content-addressed names. What is found under a key is exactly what computing it would give.

A piece is a safetensors file (tensors) with a JSON text in its metadata; it is written to a temporary name and renamed, so it is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qforge import __version__
from qforge.errors import OutputError
from qforge.files import atomic


def key(stage: str, **parts: Any) -> str:
    """The name of a piece: the stage and a hash over everything that decides its content, our version, torch's, threads and instruction set."""
    machine = {"qforge": __version__, "torch": torch.__version__, "threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}
    text = json.dumps({"stage": stage, "parts": parts, "machine": machine}, sort_keys=True, default=str)
    return f"{stage}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class Journal:
    """Pieces in one folder, and how many of them this run computed or found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.computed = 0
        self._found: set[str] = set()

    @property
    def resumed(self) -> int:
        """Pieces of earlier runs that this run took up."""
        return len(self._found)

    def load(self, name: str, *, count: bool = True) -> tuple[dict[str, torch.Tensor], Any] | None:
        """Tensors and JSON value of a piece, or None. A damaged file counts as absent."""
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as f:
                value = json.loads((f.metadata() or {})["json"])
                tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118  # not a dict
        except (SafetensorError, KeyError, ValueError, OSError):
            path.unlink(missing_ok=True)
            return None
        if count:
            self._found.add(name)
        return tensors, value

    def save(self, name: str, tensors: Mapping[str, torch.Tensor], value: Any, *, count: bool = True) -> None:
        """Keep a piece."""
        path = self.folder / f"{name}.safetensors"
        with atomic(path) as temporary:
            try:
                save_file({n: t.contiguous() for n, t in tensors.items()}, temporary, metadata={"json": json.dumps(value)})
            except SafetensorError as e:  # what it makes of the operating system's errors
                raise OutputError(f"cannot write {path}: {e}; free some space and run again (finished work is kept)") from e
        self.computed += count

    def has(self, name: str) -> bool:
        """Whether a piece is there (it may still turn out damaged)."""
        return (self.folder / f"{name}.safetensors").exists()

    def forget(self, name: str) -> None:
        """Remove a piece."""
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)
