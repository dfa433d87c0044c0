"""An ONNX graph that grows node by node, and its two files: the model, and its weights beside it, written one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from onnx import AttributeProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto, helper

from qforge import __version__
from qforge.engines.onnx_runtime import MODEL
from qforge.layouts.bits import pack_nibbles

CONTRIB = "com.microsoft"
DATA = f"{MODEL}.data"
OPSET, IR_VERSION = 21, 10  # the first with 4-bit types and blocked DequantizeLinear
TYPES = {
    torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16, torch.int8: TensorProto.INT8, torch.uint8: TensorProto.UINT8,
}  # fmt: skip
_NIBBLES = (TensorProto.INT4, TensorProto.UINT4)
_INLINE = 1024  # bytes up to which a weight lies in the model itself, where shape inference sees it
_PAGE = 4096  # large weights begin at a page, so that readers can map them


@dataclass(frozen=True, slots=True)
class Weight:
    """What is known of a weight before it is read: name, TensorProto type, shape."""

    name: str
    type: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored; two 4-bit values share one."""
        count = int(torch.Size(self.shape).numel())
        return -(-count // 2) if self.type in _NIBBLES else count * int(np.dtype(helper.tensor_dtype_to_np_dtype(self.type)).itemsize)


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights that come into being together, and how to get them by name: values of a dtype of the stored width, 4-bit ones still one an element."""

    weights: tuple[Weight, ...]
    read: Callable[[], Mapping[str, torch.Tensor]]


class Graph:
    """A graph under construction. Values are known by the name of the node (or weight) that makes them.

    Attributes:
        inputs, outputs: typed ends.
    """

    def __init__(self) -> None:
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self._nodes: list[NodeProto] = []
        self._pieces: list[Piece] = []
        self._constants: dict[str, TensorProto] = {}

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """A graph input."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, value: str, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Make a value a graph output, under a name of its own."""
        self.op("Identity", value, name=f"/{name}/Identity", out=(name,))
        self.declare(name, kind, shape)

    def declare(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Say that the value of this name is a graph output."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def op(self, kind: str, *inputs: str, name: str, domain: str = "", out: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node; an empty input is left out. Returns its first output, which has the node's name unless `out` names the outputs."""
        outputs = list(out) or [name]
        self._nodes.append(helper.make_node(kind, list(inputs), outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def constant(self, values: Any, kind: int) -> str:
        """A small constant, kept once: a number or a list of numbers."""
        array = np.asarray(values)
        name = f"/constants/{TensorProto.DataType.Name(kind)}/{str(array.tolist()).replace(' ', '')}"
        if name not in self._constants:
            self._constants[name] = helper.make_tensor(name, kind, array.shape, array.reshape(-1).tolist())
        return name

    def ints(self, *values: int) -> str:
        """A constant vector of int64."""
        return self.constant(list(values), TensorProto.INT64)

    def weights(self, piece: Piece) -> list[str]:
        """Add weights and return their names."""
        self._pieces.append(piece)
        return [w.name for w in piece.weights]

    def weight(self, name: str, tensor: torch.Tensor) -> str:
        """Add a small weight that is at hand."""
        return self.weights(Piece((Weight(name, TYPES[tensor.dtype], tuple(tensor.shape)),), lambda: {name: tensor}))[0]

    def write(self, folder: Path, metadata: Mapping[str, str]) -> list[Path]:
        """Write `model.onnx`, and `model.onnx.data` with the weights, into `folder`. Equal graphs give equal bytes."""
        initializers = list(self._constants.values())
        with open(folder / DATA, "wb") as data:
            for piece in self._pieces:
                values = piece.read()
                initializers += [_stored(w, values[w.name], data) for w in piece.weights]
        graph = helper.make_graph(self._nodes, "decoder", self.inputs, self.outputs, initializers)
        opsets = [helper.make_opsetid("", OPSET)]
        if any(n.domain == CONTRIB for n in self._nodes):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="qforge", producer_version=__version__)
        helper.set_model_props(model, dict(metadata))
        (folder / MODEL).write_bytes(model.SerializeToString(deterministic=True))
        return [folder / MODEL, folder / DATA]


def _stored(weight: Weight, values: torch.Tensor, data: IO[bytes]) -> TensorProto:
    """The initializer of a weight: its bytes within, or in the data file at the place that it names."""
    raw = _bytes(weight, values)
    assert raw.nbytes == weight.nbytes, (weight, raw.nbytes)
    found = TensorProto(name=weight.name, data_type=weight.type, dims=weight.shape)
    if raw.nbytes <= _INLINE:
        found.raw_data = raw.tobytes()
        return found
    step = _PAGE if raw.nbytes >= 16 * _PAGE else 64
    data.write(bytes(-data.tell() % step))
    found.data_location = TensorProto.EXTERNAL
    for key, value in {"location": DATA, "offset": data.tell(), "length": raw.nbytes}.items():
        found.external_data.append(StringStringEntryProto(key=key, value=str(value)))
    raw.tofile(data)
    return found


def _bytes(weight: Weight, values: torch.Tensor) -> np.ndarray:
    """The bytes (uint8) of values, in row order."""
    assert tuple(values.shape) == weight.shape, (weight, values.shape)
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    if weight.type in _NIBBLES:
        flat = pack_nibbles(torch.nn.functional.pad(flat & 0xF, (0, len(flat) % 2)))
    return flat.numpy()


def attribute(node: NodeProto, name: str) -> Any:
    """An attribute's value; None where the node has none of that name."""
    found: AttributeProto | None = next((a for a in node.attribute if a.name == name), None)
    return None if found is None else helper.get_attribute_value(found)
