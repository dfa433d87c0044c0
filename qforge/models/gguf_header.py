"""The header of a GGUF file, read with every count, length and offset held against the size of the file before it is believed.

Format: magic `GGUF`, u32 version, u64 tensor count, u64 metadata count, metadata, tensor table, padding, data. Spec: ggml's docs/gguf.md.
Arrays of strings (the vocabulary) are walked and counted, not kept; so are long arrays of numbers. Arrays of bytes are kept as bytes.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import reprlib
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from qforge.errors import ModelError
from qforge.files import check_regular
from qforge.models.weights import sized

VERSIONS = (2, 3)
_BYTE, _STRING, _ARRAY = 0, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_LONGEST_KEPT = 4096
_MOST_STRINGS = 1 << 22  # merges are half a million in the largest vocabularies
_SMALLEST_ENTRY, _SMALLEST_PAIR = 24, 13  # bytes of a tensor without dimensions and name; of a metadata pair with an empty key


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in torch's order; `start` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays of strings and long arrays as their lengths) and tensors of one file; `sha256` covers all bytes before the data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    sha256: str

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata["general.architecture"])


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ModelError: no GGUF file, an unknown version, a truncated or inconsistent one; the message says what is wrong.
    """
    return _read(path, ())


def read_arrays(path: Path, keys: Collection[str]) -> dict[str, list[Any]]:
    """Arrays of the metadata in full, strings too; a key that the file lacks, or that is no array, is left out.

    Raises:
        ModelError: as `read_gguf_header`.
    """
    header = _read(path, keys)
    return {key: list(found) for key in keys if isinstance(found := header.metadata.get(key), (list, bytes))}


def _read(path: Path, whole: Collection[str]) -> GgufHeader:
    try:
        check_regular(path)
        size = path.stat().st_size
        if size < 24:
            raise ModelError(f"{path} is no GGUF file: it has {size} bytes" if size else f"{path} is empty; copy the model again")
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, whole).header()
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e


class _Reader:
    """A cursor that never passes the end of the file. Arrays of the keys `whole` are kept, however long."""

    def __init__(self, path: Path, data: mmap.mmap, whole: Collection[str]) -> None:
        self._path = path
        self._data = data
        self._whole = whole
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        num_tensors, num_pairs = self._start()
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the key '{key}' occurs twice")
            metadata[key] = self._value(self._unpack("I"), key in self._whole)
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not re.fullmatch(r"[\w.-]{1,64}", architecture):
            raise self._damaged("it has no general.architecture" if architecture is None else f"general.architecture is {reprlib.repr(architecture)}, no name")
        rows = [self._row() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment}, not a power of two")
        end = self._at
        data_start = -(-end // alignment) * alignment
        tensors = [self._placed(*row, data_start=data_start, alignment=alignment) for row in rows]
        self._check_overlap(tensors)
        return GgufHeader(self._path, metadata, {t.name: t for t in tensors}, hashlib.sha256(self._data[:end]).hexdigest())

    def _start(self) -> tuple[int, int]:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ModelError(f"{self._path} is no GGUF file: it starts with {magic!r} instead of b'GGUF'")
        version = self._unpack("I")
        if version not in VERSIONS:
            why = " (it was written for machines of the other byte order)" if version & 0xFFFF == 0 else ""
            raise ModelError(f"{self._path} is GGUF version {version}{why}; qforge reads versions {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_pairs = self._unpack("Q"), self._unpack("Q")
        if num_tensors * _SMALLEST_ENTRY + num_pairs * _SMALLEST_PAIR > self._size - self._at:
            raise self._damaged(f"its header tells of {num_tensors} tensors and {num_pairs} metadata entries, which do not fit into its {self._size} bytes")
        return num_tensors, num_pairs

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or cut short: {what}; copy the model again")

    def _skip(self, count: int) -> int:
        start = self._at
        if count > self._size - start:
            raise self._damaged(f"at byte {start} of {self._size} its header needs {count} bytes more")
        self._at = start + count
        return start

    def _take(self, count: int) -> bytes:
        start = self._skip(count)
        return self._data[start : self._at]

    def _unpack(self, code: str) -> Any:
        start = self._skip(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self._data, start)[0]

    def _string(self) -> str:
        raw = self._take(self._unpack("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as e:
            raise self._damaged(f"a text before byte {self._at} is not UTF-8") from e

    def _value(self, kind: int, whole: bool) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._unpack("I"), self._unpack("Q"), whole)
        raise self._damaged(f"a metadata value before byte {self._at} has the unknown type {kind}")

    def _array(self, kind: int, count: int, whole: bool) -> Any:
        if kind in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[kind]}")
            start = self._skip(count * width)
            if kind == _BYTE:
                return self._data[start : self._at]
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, start)) if whole or count <= _LONGEST_KEPT else count
        if kind != _STRING:
            raise self._damaged(f"an array before byte {self._at} has elements of the unknown type {kind}")
        if count > _MOST_STRINGS or count * 8 > self._size - self._at:
            raise self._damaged(f"an array of {count} strings at byte {self._at} does not fit into its {self._size} bytes")
        if whole:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            self._skip(self._unpack("Q"))
        return count

    def _row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._unpack("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor '{name}' has {num_dimensions} dimensions")
        shape = tuple(self._unpack("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._unpack("I"), self._unpack("Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int, *, data_start: int, alignment: int) -> GgufTensor:
        try:
            ggml_type = GGMLQuantizationType(kind)
        except ValueError as e:
            raise ModelError(f"{self._path}: tensor '{name}' has the type {kind}, which the installed gguf package does not know; a newer one may: pip install -U gguf") from e
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if shape[-1] % block:
            raise self._damaged(f"tensor '{name}' has rows of {shape[-1]} values, which are no whole blocks of {ggml_type.name}")
        nbytes = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise self._damaged(f"tensor '{name}' starts at {offset}, which is not aligned to {alignment}")
        if data_start + offset + nbytes > self._size:
            raise self._damaged(f"tensor '{name}' should end at byte {data_start + offset + nbytes}, the file has {self._size}")
        if not sized(shape):
            raise self._damaged(f"tensor '{name}' has the shape {list(shape)}")
        if 0 in shape:
            raise self._damaged(f"tensor '{name}' has no values (shape {list(shape)})")
        return GgufTensor(name, shape, ggml_type, data_start + offset, nbytes)

    def _check_overlap(self, tensors: list[GgufTensor]) -> None:
        if len({t.name for t in tensors}) != len(tensors):
            raise self._damaged("a tensor's name occurs twice")
        previous: GgufTensor | None = None
        for t in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
            if previous is not None and t.start < previous.start + previous.nbytes:
                raise self._damaged(f"tensors '{previous.name}' and '{t.name}' overlap")
            previous = t
