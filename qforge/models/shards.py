"""Safetensors files as a source of weights: every header is checked against its file before anything is allocated, and tensors are read one at a time.

Format: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, data_offsets), the data. Spec: the safetensors project's README.
The file is read with plain reads, not mapped, so that resident memory is what was asked for.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.files import check_regular, sha256_file
from qforge.models.weights import MOST_DIMENSIONS, TensorInfo, digest, listed, sized

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
_MOST_TENSORS = 1 << 18
_LONGEST_NAME = 255  # bytes, of a file
_LARGEST_HEADER = 100_000_000  # the limit of the format's own reader
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    start: int
    nbytes: int
    info: TensorInfo


class Shards:
    """Tensors of one or several safetensors files, in their stored dtype."""

    def __init__(self, paths: list[Path]) -> None:
        """Read and check the headers of `paths`.

        Raises:
            ModelError: a file is missing, truncated, or its header does not fit it; or two files hold one name.
        """
        self.paths = paths
        self._fingerprint = ""
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                if name in self._entries:
                    raise ModelError(f"tensor '{name}' is in two files: {self._entries[name].path.name} and {path.name}; the checkpoint is mixed up")
                self._entries[name] = entry

    def names(self) -> list[str]:
        """All tensor names, file by file."""
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        """Shape and stored dtype."""
        return self._entries[name].info

    def read(self, name: str) -> torch.Tensor:
        """A fresh CPU tensor in its stored dtype."""
        entry = self._entries[name]
        raw = torch.empty(entry.nbytes, dtype=torch.uint8)
        try:
            with open(entry.path, "rb", buffering=0) as f:
                f.seek(entry.start)
                _fill(f, memoryview(raw.numpy().data))
        except (OSError, EOFError) as e:
            raise ModelError(f"cannot read '{name}' from {entry.path}: {e}") from e
        return raw.view(entry.info.dtype).reshape(entry.info.shape)

    def fingerprint(self) -> str:
        """Over the names and contents of the files."""
        if not self._fingerprint:
            self._fingerprint = digest("safetensors", *(f"{p.name}:{sha256_file(p)}" for p in self.paths))
        return self._fingerprint


def _fill(f: Any, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = f.readinto(buffer[done : done + (1 << 30)])
        if not count:
            raise EOFError("the file ended early; was it changed while qforge ran?")
        done += count


def find(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory: those of its index, or its single file.

    Raises:
        ModelError: there are none (only pickles, for instance), or the index names files that are not there.
    """
    if (folder / INDEX).exists():
        return _indexed(folder)
    found = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{folder} holds {len(found)} safetensors files ({listed(p.name for p in found)}) but no {INDEX} that says which belong together")
    pickles = sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as pickle ({listed(pickles)}), which can run code when it is opened, so qforge never loads it; "
            "convert it once where you trust it: transformers' from_pretrained(...).save_pretrained(...) writes safetensors"
        )
    raise ModelError(f"{folder} holds no weights: expected {SINGLE}, or {INDEX} and its files")


def _indexed(folder: Path) -> list[Path]:
    path = folder / INDEX
    try:
        check_regular(path, most_bytes=_LARGEST_HEADER)
        files = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        safe = all(isinstance(f, str) and Path(f).name == f and f.endswith(".safetensors") and len(f.encode()) <= _LONGEST_NAME for f in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ModelError(f"{path} is not an index of safetensors files ({type(e).__name__}: {e}); copy the model again") from e
    if not safe or not files:
        raise ModelError(f"{path} must name .safetensors files that lie beside it; it names {listed(map(str, files)) or 'none'}")
    absent = [f for f in files if not (folder / f).exists()]
    if absent:
        raise ModelError(f"{path} names {len(files)} files, of which {len(absent)} are not there: {listed(absent)}; copy the model again")
    return [folder / f for f in files]


def check_index(folder: Path, shards: Shards) -> None:
    """Refuse an index whose tensors are not in its files.

    Raises:
        ModelError: naming the first few.
    """
    path = folder / INDEX
    if path.exists():
        held = set(shards.names())
        absent = [n for n in json.loads(path.read_bytes())["weight_map"] if n not in held]
        if absent:
            raise ModelError(f"{path} names tensors that its files do not hold: {listed(absent)}; copy the model again")


def read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, after checking that its header is sane and fits the file.

    Raises:
        ModelError: naming the file and what is wrong.
    """
    try:
        check_regular(path)
        size = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                what = "is empty" if size == 0 else f"is cut short or no safetensors file: its header should take {length} bytes, the file has {size}"
                raise ModelError(f"{path} {what}; copy the model again")
            if length > _LARGEST_HEADER:
                raise ModelError(f"{path} has a header of {length} bytes; safetensors allows {_LARGEST_HEADER}")
            raw = f.read(length)
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} has a header that is not JSON ({e}); the file is damaged") from e
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a header that is not a JSON object; the file is damaged")
    told = header.pop("__metadata__", None)
    if told is not None and not (isinstance(told, dict) and all(isinstance(value, str) for value in told.values())):
        raise ModelError(f"{path} has metadata that are no texts by name; the file is damaged")
    if len(header) > _MOST_TENSORS:
        raise ModelError(f"{path} tells of {len(header):,} tensors; no model has more than {_MOST_TENSORS:,} in one file")
    entries = {name: _entry(path, name, raw_entry, 8 + length) for name, raw_entry in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: Path, name: str, raw: Any, data_start: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = raw["dtype"], raw["shape"], raw["data_offsets"]
        sane = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
        sane = sane and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane:
        raise ModelError(f"{path}: the header's entry for '{name}' is malformed; the file is damaged")
    if dtype not in _DTYPES:
        raise ModelError(f"{path}: tensor '{name}' has the type {dtype!r}, which qforge does not read; it reads {', '.join(_DTYPES)}")
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if expected != end - begin:
        raise ModelError(f"{path}: tensor '{name}' of {dtype} {shape} needs {expected} bytes, but the header gives it {end - begin}; the file is damaged")
    if not sized(shape):
        raise ModelError(f"{path}: tensor '{name}' has the shape {shape}; the file is damaged")
    return _Entry(path, data_start + begin, end - begin, TensorInfo(tuple(shape), _DTYPES[dtype]))


def _check_layout(path: Path, entries: dict[str, _Entry], data_start: int, size: int) -> None:
    """Tensors must follow one another without gap or overlap and end where the file ends."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != position:
            raise ModelError(f"{path}: tensor '{name}' starts at byte {entry.start} where {position} was expected (a gap or an overlap); the file is damaged")
        position += entry.nbytes
    if position > size:
        raise ModelError(f"{path} is cut short: its header tells of {position} bytes, the file has {size}; copy the model again")
    if position < size:
        raise ModelError(f"{path} holds {size - position} bytes after its last tensor; the file is damaged")
