"""A packed model as one file that is mapped: 16 bytes of mark and checksum, the length of a JSON header, the header, and buffers that start at multiples of 64 bytes.

The checksum covers all that follows it, so that what was cut short, overwritten or written by something else is never used. A process that has run for a second moves what it
has mapped into huge pages: in a file's small ones weights take up to a sixth more time for each token (docs/log.md), and before that second a start would wait for the copy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qforge.machine_limits import free_memory
from qforge.ops.native_module import context, module
from qforge.ops.native_weight import Buffer, NativeWeight, address
from qforge.ops.pages import huge_pages
from qforge.runtime.native_model import NativeEmbedding, NativeLayer, NativeMlp, NativeModel, NativePart, NativeProduct
from qforge.types import ExpertsSpec, ModelSpec, RopeSpec

_MARK = b"QFPACK\r\n"
_START = 24  # mark, checksum, length of the header
_ALIGN = 64
_SETTLED_S = 1.0  # seconds after which a process is taken to go on
_BUFFERS = ("scales", "half_scales", "zeros", "code_sums", "pair_sums", "book", "bias", "gather")  # of a weight, any of which may be None
_Buffers = dict[tuple[int, int], tuple[int, Buffer]]  # where each lies and its size: its place in the file, and the buffer


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """What one file holds: the model, and what its text needs.

    Attributes:
        key: what the file was made of.
        tokenizer: see `PlainTokenizer`, as `chat_template` and `special_tokens`.
    """

    key: str
    model: NativeModel
    end_ids: frozenset[int]
    tokenizer: Buffer
    chat_template: str | None
    special_tokens: dict[str, str]


@dataclass(frozen=True, eq=False)
class _View:
    """What numpy's array interface asks of an object, and holds."""

    mapped: Any
    __array_interface__: dict[str, Any]


def write(path: Path, packed: PackedModel, threads: int | None = None) -> None:
    """Write the file as it stands; the caller renames it.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    header, buffers = _laid_out(packed)
    first = _aligned(_START + len(header))
    size = first + _size(buffers)
    with open(path, "wb+") as f:
        f.write(_MARK + bytes(8) + len(header).to_bytes(8, "little") + header)
        for offset, buffer in buffers.values():
            f.seek(first + offset)
            f.write(buffer.data)
        f.truncate(size)
        f.flush()
        checksum = _checksum(_bytes(_mapped(f.fileno(), size), size), threads)
        f.seek(8)
        f.write(checksum)


def nbytes(packed: PackedModel) -> int:
    """Of the file that `write` writes."""
    header, buffers = _laid_out(packed)
    return _aligned(_START + len(header)) + _size(buffers)


def read(path: Path, key: str, threads: int | None = None) -> PackedModel | None:
    """Map a file; None where it is not there, is damaged, or is not the one that was asked for."""
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            if size < _START or size % _ALIGN:
                return None
            mapped = _mapped(f.fileno(), size)
    except OSError:
        return None
    whole = _bytes(mapped, size)
    if bytes(whole[:8]) != _MARK or bytes(whole[8:16]) != _checksum(whole, threads):
        return None
    length = int.from_bytes(bytes(whole[16:_START]), "little")
    first = _aligned(_START + length)
    told = json.loads(bytes(whole[_START : _START + length]))
    if told["key"] != key:
        return None
    if huge_pages() and 2 * size <= free_memory():
        mapped.move_later(_SETTLED_S)
    return _built(told, whole[first:])


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _size(buffers: _Buffers) -> int:
    return sum(_aligned(b.nbytes) for _, b in buffers.values())


def _laid_out(packed: PackedModel) -> tuple[bytes, _Buffers]:
    """The header, and each buffer with its place, by where it lies."""
    buffers: _Buffers = {}
    return json.dumps(_told(packed, buffers)).encode(), buffers


def _mapped(file: int, size: int) -> Any:
    native = module()
    assert native is not None
    return native.MappedFile(file, size)


def _bytes(mapped: Any, size: int) -> Buffer:
    """All of a mapped file, which lives as long as the array or a part of it."""
    return np.asarray(_View(mapped, {"version": 3, "typestr": "|u1", "shape": (size,), "data": (mapped.address, True)}))


def _checksum(whole: Buffer, threads: int | None) -> bytes:
    return int(context(threads).checksum(address(whole) + 16, len(whole) - 16)).to_bytes(8, "little")


def _told(packed: PackedModel, buffers: _Buffers) -> dict[str, Any]:
    """The header: fields as they are, and a buffer as its place and size. Buffers that several share are kept once."""
    end = 0

    def place(b: Buffer | None) -> list[int] | None:
        nonlocal end
        if b is None:
            return None
        at = (address(b), b.nbytes)
        if at not in buffers:
            buffers[at] = (end, b)
            end += _aligned(b.nbytes)
        return [buffers[at][0], b.nbytes]

    def product(p: NativeProduct) -> list[Any]:
        return [p.kernel, [part(x) for x in p.parts]]

    def part(p: NativePart) -> list[Any]:
        assert p.weight is not None
        assert p.elsewhere is None
        w = p.weight
        sizes = [w.format, w.out_features, w.in_features, w.blocks, w.block_k, w.run, w.activations]
        return [p.out_features, p.in_features, p.arithmetic, p.static_scale, sizes, [place(b) for b in (w.codes, *(getattr(w, name) for name in _BUFFERS))]]

    model, e = packed.model, packed.model.embedding
    return {
        "key": packed.key, "spec": asdict(model.spec), "frequencies": [place(f) for f in model.frequencies], "norm": place(model.norm), "head": product(model.head),
        "layers": [
            [[place(n) for n in layer.norms], product(layer.qkv), product(layer.output), product(layer.router) if layer.router else None,
             [(product(mlp.gate_up), product(mlp.down)) for mlp in layer.mlps]]
            for layer in model.layers
        ],
        "embedding": [e.format, place(e.table)], "end_ids": sorted(packed.end_ids), "tokenizer": place(packed.tokenizer),
        "chat_template": packed.chat_template, "special_tokens": packed.special_tokens,
    }  # fmt: skip


def _built(told: dict[str, Any], room: Buffer) -> PackedModel:
    def maybe(at: list[int] | None) -> Buffer | None:
        return None if at is None else room[at[0] : at[0] + at[1]]

    def product(p: list[Any]) -> NativeProduct:
        return NativeProduct(p[0], tuple(_part(x, maybe) for x in p[1]))

    def sure(at: list[int]) -> Buffer:
        return room[at[0] : at[0] + at[1]]

    def layer(norms: list[Any], qkv: list[Any], output: list[Any], router: list[Any] | None, mlps: list[Any]) -> NativeLayer:
        parts = tuple(NativeMlp(product(gate_up), product(down)) for gate_up, down in mlps)
        return NativeLayer(tuple(maybe(n) for n in norms), product(qkv), product(output), None if router is None else product(router), parts)

    layers = tuple(layer(*each) for each in told["layers"])
    name, table = told["embedding"]
    model = NativeModel(_spec(told["spec"]), tuple(sure(f) for f in told["frequencies"]), layers, sure(told["norm"]), NativeEmbedding(name, maybe(table)), product(told["head"]))
    return PackedModel(told["key"], model, frozenset(told["end_ids"]), sure(told["tokenizer"]), told["chat_template"], told["special_tokens"])


def _part(told: list[Any], buffer: Callable[[list[int] | None], Buffer | None]) -> NativePart:
    out_features, in_features, arithmetic, static_scale, sizes, places = told
    codes, *others = (buffer(at) for at in places)
    assert codes is not None
    name, columns, inputs, blocks, block_k, run, activations = sizes
    weight = NativeWeight(name, columns, inputs, blocks, block_k, run, activations, codes, **dict(zip(_BUFFERS, others, strict=True)))
    return NativePart(out_features, in_features, weight, arithmetic, static_scale)


def _spec(told: dict[str, Any]) -> ModelSpec:
    ropes = tuple(RopeSpec(r["theta"], r["kind"], tuple((n, v) for n, v in r["parameters"]), tuple(r["factors"]), r["rotated"], r["interleaved"]) for r in told["layer_ropes"])
    scales = tuple((key, value) for key, value in told["kv_scales"])
    experts = None if told["experts"] is None else ExpertsSpec(**{**told["experts"], "layers": tuple(told["experts"]["layers"])})
    return ModelSpec(**{**told, "layer_windows": tuple(told["layer_windows"]), "layer_ropes": ropes, "experts": experts, "kv_scales": scales, "norms": tuple(told["norms"])})
