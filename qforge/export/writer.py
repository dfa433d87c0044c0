"""Streaming safetensors: the header from what is known of the tensors, then their bytes one after the other, so that one tensor is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from qforge.files import atomic, write_text
from qforge.models.weights import TensorInfo

SHARD_BYTES = 4_500_000_000
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.uint32: "U32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that come into being together: what is known of them beforehand, and how to get them."""

    infos: Mapping[str, TensorInfo]
    read: Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    info: TensorInfo
    piece: Piece

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return int(torch.Size(self.info.shape).numel()) * self.info.dtype.itemsize


def write_safetensors(folder: Path, pieces: Sequence[Piece], *, stem: str = "model", shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the pieces, in their order, to `<stem>.safetensors`, or to shards with an index once that would exceed `shard_bytes`.

    Equal tensors give equal bytes: the order is the given one, the only metadata is `{"format": "pt"}`.

    Returns:
        The files written.
    Raises:
        OutputError: the disk is full or cannot be written.
    """
    shards = _shards(pieces, shard_bytes)
    if len(shards) == 1:
        path = folder / f"{stem}.safetensors"
        _write_entries(path, shards[0])
        return [path]
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for i, entries in enumerate(shards):
        path = folder / f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_entries(path, entries)
        paths.append(path)
        weight_map |= dict.fromkeys((e.name for e in entries), path.name)
    total = sum(e.size for entries in shards for e in entries)
    index = folder / f"{stem}.safetensors.index.json"
    write_text(index, json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=1) + "\n")
    return [*paths, index]


def _shards(pieces: Sequence[Piece], shard_bytes: int) -> list[list[_Entry]]:
    """Whole pieces per shard; inside a piece wide types first, so that every tensor starts at a multiple of its element size."""
    shards: list[list[_Entry]] = [[]]
    size = 0
    for piece in pieces:
        entries = sorted((_Entry(name, info, piece) for name, info in piece.infos.items()), key=lambda e: (-e.info.dtype.itemsize, e.name))
        added = sum(e.size for e in entries)
        if shards[-1] and size + added > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].extend(entries)
        size += added
    return [_aligned(entries) for entries in shards]


def _aligned(entries: list[_Entry]) -> list[_Entry]:
    """The entries in an order in which each starts at a multiple of its element size, as safetensors' readers need: as given, or wide types first."""
    offset = 0
    for entry in entries:
        if offset % entry.info.dtype.itemsize:
            return sorted(entries, key=lambda e: -e.info.dtype.itemsize)  # costs a second read of some pieces; only odd widths come here
        offset += entry.size
    return entries


def write_file(path: Path, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> None:
    """Write the pieces to one file, wide types first, whole or not at all.

    Raises:
        OutputError: the disk is full or cannot be written.
    """
    entries = [_Entry(name, info, piece) for piece in pieces for name, info in piece.infos.items()]
    _write_entries(path, _aligned(entries), metadata)


def _write_entries(path: Path, entries: Sequence[_Entry], metadata: Mapping[str, str] = MappingProxyType({"format": "pt"})) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for e in entries:
        header[e.name] = {"dtype": _TYPES[e.info.dtype], "shape": list(e.info.shape), "data_offsets": [offset, offset + e.size]}
        offset += e.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic(path) as temporary, open(temporary, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        current: Piece | None = None
        tensors: Mapping[str, torch.Tensor] = {}
        for e in entries:
            if e.piece is not current:
                current, tensors = e.piece, {}  # let the last piece go before the next one comes
                tensors = e.piece.read()
            tensor = tensors[e.name]
            assert tensor.dtype == e.info.dtype, (e.name, tensor.dtype, e.info)
            assert tuple(tensor.shape) == tuple(e.info.shape), (e.name, tensor.shape, e.info)
            f.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
