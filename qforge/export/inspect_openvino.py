"""What an OpenVINO model (`openvino_model.xml`) holds, and whether it is sound: constants of weights with their types, and every constant's place in the data beside it.

Letters: O output features, C groups in a row, G inputs of a group.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch

from qforge.engines import openvino_runtime
from qforge.engines.opening import check_opens
from qforge.errors import ModelError
from qforge.export.finite import check_finite
from qforge.export.ranges import check_apart
from qforge.models.config import read_json
from qforge.models.weights import MOST_DIMENSIONS

_BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "f8e4m3": 8,
    "f8e5m2": 8,
    "i8": 8,
    "u8": 8,
    "i4": 4,
    "u4": 4,
    "i2": 2,
    "u2": 2,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "u64": 64,
    "boolean": 8,
    "f64": 64,
}
_MOST_BYTES = 256 << 20  # of the graph; that of a model of 100 layers takes a tenth
_MOST_ELEMENTS, _MOST_DEPTH = 1 << 21, 256
_FLOATS = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
_CODES = {"i4", "u4", "i8", "u8", "f8e4m3", "f8e5m2"}


@dataclass(frozen=True, slots=True)
class _Constant:
    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def inspect_openvino(path: Path, *, check: bool = False) -> dict[str, Any]:
    """Describe an IR; the data beside it must be there, whole and where the graph says.

    Args:
        check: read the data, too: floats, scales among them, must be finite.

    Raises:
        ModelError: it is no OpenVINO IR, or damaged.
    """
    net = _parsed(path)
    for scope in (e for e in net.iter() if e.find("layers") is not None):
        _check_edges(scope, path)
    data = path.with_suffix(".bin")
    size = data.stat().st_size if data.is_file() else 0
    constants = [_constant(layer, path, size) for layer in net.iter("layer") if layer.get("type") == "Const"]
    check_apart(((c.offset, c.nbytes) for c in constants), data)
    weights = [c for c in constants if c.name.endswith(".weight") or c.name.rpartition(".")[2] == "bias"]
    parameters = sum(math.prod(c.shape) for c in weights)
    tensor_bytes = sum(c.nbytes for c in constants)
    if check:
        for c in constants:
            if c.kind in _FLOATS:
                stored = torch.from_numpy(np.fromfile(data, np.uint8, c.nbytes, offset=c.offset)).view(_FLOATS[c.kind])
                check_finite(stored.float().numpy(), f"{path}: the constant '{c.name}'")
        if openvino_runtime.missing() is None:
            check_opens(openvino_runtime.NAME, path, path.stat().st_size + size)
    config = path.with_name("config.json")
    layers = Counter(str(layer.get("type")) for layer in net.iter("layer"))
    return {
        "path": str(path),
        "kind": "OpenVINO model",
        "family": str(read_json(config).get("model_type", "decoder")) if config.exists() else "decoder",
        "parameters": parameters,
        "size_bytes": path.stat().st_size + size,
        "tensor_bytes": tensor_bytes,
        "bits_per_parameter": round(8 * tensor_bytes / max(parameters, 1), 4),
        "schemes": dict(Counter(_form(c) for c in weights if c.kind in _CODES).most_common()),
        "tensor_types": dict(Counter(c.kind for c in weights).most_common()),
        "metadata": {e.tag: e.get("value") for e in net.iterfind("rt_info/qforge/*")} | {e.get("name", ""): e.get("value") for e in net.iterfind("rt_info/info")},
        "operators": dict(sorted(layers.items())),
        "linears": [{"name": c.name.removesuffix(".weight"), "scheme": _form(c), "shape": list(c.shape)} for c in weights if c.kind in _CODES],
        "provenance": None,
        "sound": True,
        "checked": "all tensors read" if check else "graph, sizes and offsets",
    }


def _parsed(path: Path) -> ElementTree.Element:
    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes; no graph of a model takes more than {_MOST_BYTES:,}")
    try:
        parser = ElementTree.XMLParser(target=_Measured(path))
        parser.feed(path.read_bytes())
        net: ElementTree.Element = parser.close()
    except (ElementTree.ParseError, ValueError, LookupError) as e:
        raise ModelError(f"{path} is no OpenVINO IR, or damaged: {e}") from e
    if net.tag != "net" or net.find("layers/layer") is None:
        raise ModelError(f"{path} is no OpenVINO IR, or damaged: it holds no layers of a net")
    return net


class _Measured(ElementTree.TreeBuilder):
    """A tree that is neither deeper nor larger than any graph of a model."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._depth, self._count = path, 0, 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > _MOST_DEPTH or self._count > _MOST_ELEMENTS:
            raise ModelError(f"{self._path} is no OpenVINO IR, or damaged: its XML has more than {_MOST_ELEMENTS:,} elements or {_MOST_DEPTH} of them within one another")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self._depth -= 1
        return super().end(tag)


def _check_edges(scope: ElementTree.Element, path: Path) -> None:
    """Every input of the layers of a net (or of a body of control flow) comes from one output that there is, and none from itself."""
    layers = scope.findall("layers/layer")
    ids = [layer.get("id") for layer in layers]
    outputs, inputs = ({(layer.get("id"), port.get("id")) for layer in layers for port in layer.findall(f"{end}/port")} for end in ("output", "input"))
    edges = [[(edge.get(f"{end}-layer"), edge.get(f"{end}-port")) for end in ("from", "to")] for edge in scope.findall("edges/edge")]
    twice = [i for i, count in Counter(ids).items() if count > 1]
    if twice:
        raise ModelError(f"{path} is damaged: it holds two layers of the id {twice[0]!r:.40}")
    if len(layers) > 1 and not edges:
        raise ModelError(f"{path} is damaged: no edges lead from layer to layer")
    for ends, known, kind in zip(zip(*edges, strict=True), (outputs, inputs), ("from an output", "to an input"), strict=False):
        unknown = [end for end in ends if end not in known]
        if unknown:
            raise ModelError(f"{path} is damaged: an edge leads {kind} that there is not, port {unknown[0][1]!r:.40} of layer {unknown[0][0]!r:.40}")
    reached = Counter(end for _, end in edges)
    unfed = [end for end in inputs if reached[end] != 1]
    if unfed:
        layer, port = min(unfed, key=str)
        raise ModelError(f"{path} is damaged: {reached[layer, port] or 'no'} edges lead to port {port!r:.40} of layer {layer!r:.40}, which takes one")
    order: TopologicalSorter[str | None] = TopologicalSorter()
    for (before, _), (after, _) in edges:
        order.add(after, before)
    try:
        order.prepare()
    except CycleError as e:
        raise ModelError(f"{path} is damaged: the layer {e.args[1][0]!r:.40} follows itself") from e


def _constant(layer: ElementTree.Element, path: Path, size: int) -> _Constant:
    """A constant whose bytes are all there."""
    name, told = str(layer.get("name")), layer.find("data")
    try:
        assert told is not None
        kind, nbytes, offset = told.attrib["element_type"], int(told.attrib["size"]), int(told.attrib["offset"])
        shape = tuple(int(d) for d in told.attrib["shape"].split(",", MOST_DIMENSIONS) if d.strip())
        expected = -(-math.prod(shape) * _BITS[kind] // 8)
    except (AssertionError, KeyError, ValueError) as e:
        raise ModelError(f"{path}: what it says of the constant '{name}' cannot be read ({type(e).__name__}: {str(e)[:80]})") from e
    if any(d < 0 for d in shape) or nbytes != expected:
        raise ModelError(f"{path}: the size of the constant '{name}' is not that of its shape and type, {kind}; the file is damaged")
    if offset < 0 or offset + nbytes > size:
        raise ModelError(f"{path}: the constant '{name}' does not lie within the {size:,} bytes of {path.stem}.bin; copy the model again")
    return _Constant(name, kind, shape, nbytes, offset)


def _form(constant: _Constant) -> str:
    """How codes `[O, C, G]` are stored: their type, and how many share a scale where that is less than a row."""
    if len(constant.shape) == 3 and constant.shape[1] > 1:
        return f"{constant.kind}, groups of {constant.shape[2]}"
    return constant.kind
