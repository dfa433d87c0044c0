"""Tiles that were timed on this device: `tiles/<device>-triton-<version>.json` in the cache folder, written by `qforge bench MODEL --tune`, preferred over the shipped ones."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qforge.files import cache_folder, write_text
from qforge.ops.triton.present import interpreted
from qforge.ops.triton.tiles import Tile

_FORMAT = 2  # 1: 4-bit weights had a kernel for one row, and tiles of it
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product as tiles are chosen for it.

    Attributes:
        kernel: `w4`, or `w8-int8` or `w8-fp8`.
        group, input_group: inputs that share a scale of the weight, or of the activations; 0 for all.
        zeros: whether the weight has zero points.
    """

    kernel: str
    outputs: int
    inputs: int
    group: int
    input_group: int = 0
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """The fastest tile for a product of up to `rows` rows; times in microseconds, the shipped tile's in the same run."""

    product: Product
    rows: int
    tile: Tile
    microseconds: float
    shipped_microseconds: float


def path_of(device_name: str, triton: str) -> Path:
    """Where the table of a device is."""
    return cache_folder() / "tiles" / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}-triton-{triton}.json"


def write(path: Path, found: Iterable[Tuned], facts: dict[str, Any]) -> None:
    """Write a table; what it held of other products stays. `facts` (device, versions, date) are for who reads it."""
    new = {(t.product, t.rows): t for t in found}
    kept = {(t.product, t.rows): t for t in _read(path)}
    entries = [asdict(t) for t in (kept | new).values()]
    write_text(path, json.dumps({"format": _FORMAT, **facts, "tiles": entries}, indent=1) + "\n")


def find(device: torch.device, product: Product, rows: int) -> Tile | None:
    """The tile that was found fastest for the least number of rows that is not smaller; None where none was timed."""
    table = _table(device)
    return next((tile for most, tile in table.get(product, ()) if rows <= most), None) if table else None


@functools.cache
def _table(device: torch.device) -> dict[Product, tuple[tuple[int, Tile], ...]]:
    if interpreted() or device.type != "cuda":
        return {}
    table: dict[Product, list[tuple[int, Tile]]] = {}
    for t in _read(path_of(torch.cuda.get_device_name(device), importlib.metadata.version("triton"))):
        table.setdefault(t.product, []).append((t.rows, t.tile))
    return {product: tuple(sorted(tiles, key=lambda t: t[0])) for product, tiles in table.items()}


def _read(path: Path) -> list[Tuned]:
    """What a table holds; a damaged one holds nothing, and that is said."""
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text())
        if stored["format"] != _FORMAT:
            return []
        return [Tuned(Product(**e["product"]), e["rows"], Tile(**e["tile"]), e["microseconds"], e["shipped_microseconds"]) for e in stored["tiles"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        _log.warning("the tuned tiles in %s cannot be read (%s) and are not used; qforge bench MODEL --tune writes them anew", path, e)
        return []
