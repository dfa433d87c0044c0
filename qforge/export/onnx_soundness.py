"""Whether an ONNX graph can run at all, whoever exported it: the onnx package's checks of names, order, operators and attributes, and sizes of what contributed operators take."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, checker, defs, helper

from qforge.errors import ModelError
from qforge.export.onnx_graph import CONTRIB

_STANDARD = ("", "ai.onnx")
_RUNTIMES_OWN = ("SimplifiedLayerNormalization", "LayerNormalization", "MemcpyFromHost", "MemcpyToHost")  # in the standard domain to ONNX Runtime, not (in every version) to onnx

_ROTATIONS = {"GroupQueryAttention": slice(7, 9), "RotaryEmbedding": slice(2, 4)}  # inputs that are tables of cosines and sines


def check_graph(model: ModelProto, path: Path) -> None:
    """Refuse a model whose graph no engine could run.

    Raises:
        ModelError: it names what is wrong first.
    """
    newest = defs.onnx_opset_version()
    for told in model.opset_import:
        if told.domain in _STANDARD and told.version > newest:
            raise ModelError(
                f"{path} asks for version {told.version} of the standard operators, and the onnx package here knows those up to {newest}; the file is damaged or onnx too old"
            )
    if not model.graph.output:
        raise ModelError(f"{path} is damaged: its graph has no outputs")
    try:
        checker.check_model(_checked(model).SerializeToString())
    except (checker.ValidationError, ValueError) as e:
        raise ModelError(f"{path} is no sound ONNX graph: {' '.join(str(e).split())[:300]}") from e
    _check_scope(model.graph, path, ChainMap())


def stored_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Every initializer, those of bodies of control flow too, and attributes whose data lie outside."""
    yield from graph.initializer
    for node in graph.node:
        yield from (t for a in node.attribute for t in (a.t, *a.tensors) if t.data_location == TensorProto.EXTERNAL)
        for body in _bodies(node):
            yield from stored_tensors(body)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for a in node.attribute:
        if a.HasField("g"):
            yield a.g
        yield from a.graphs


def _checked(model: ModelProto) -> ModelProto:
    """A copy for the checker, which would look for weights where the process stands and refuse symbolic links: they become inputs. What is ONNX Runtime's own is marked so."""
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions, graph=_without_weights(model.graph))
    if light.opset_import and all(o.domain != CONTRIB for o in light.opset_import):
        light.opset_import.add(domain=CONTRIB, version=1)
    for function in light.functions:
        _mark(function.node)
    return light


def _without_weights(graph: GraphProto) -> GraphProto:
    light = GraphProto(name=graph.name or "graph", node=graph.node, input=graph.input, output=graph.output)
    inputs = {i.name for i in graph.input}
    light.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer if t.name not in inputs)
    _mark(light.node)
    return light


def _mark(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        if node.op_type in _RUNTIMES_OWN and node.domain in _STANDARD:
            node.domain = CONTRIB
        for tensor in (t for a in node.attribute for t in (a.t, *a.tensors) if t.data_location == TensorProto.EXTERNAL):
            tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
        for body in _bodies(node):
            body.CopyFrom(_without_weights(body))


def _check_scope(graph: GraphProto, path: Path, outside: ChainMap[str, TensorProto]) -> None:
    """Initializers are named once, and those of MatMulNBits have the sizes that it says; names from outside are seen within a body."""
    twice = [name for name, count in Counter(t.name for t in graph.initializer).items() if count > 1]
    if twice:
        raise ModelError(f"{path} is damaged: it holds two weights of the name '{twice[0]}'")
    known = outside.new_child({t.name: t for t in graph.initializer})
    for node in graph.node:
        if node.op_type == "MatMulNBits" and node.domain == CONTRIB:
            _check_packed(node, path, known)
        if node.domain == CONTRIB and node.op_type in _ROTATIONS:
            _check_rotation(node, path, known)
        for body in _bodies(node):
            _check_scope(body, path, known)


def _check_rotation(node: NodeProto, path: Path, known: Mapping[str, TensorProto]) -> None:
    """Cosines and sines of positions are two tables of one shape."""
    shapes = [list(known[name].dims) for name in list(node.input)[_ROTATIONS[node.op_type]] if name in known]
    if len(shapes) == 2 and (shapes[0] != shapes[1] or len(shapes[0]) != 2):
        raise ModelError(f"{path}: {node.op_type} '{node.name}' has cosines of shape {shapes[0][:8]} and sines of {shapes[1][:8]}; the file is damaged")


def _check_packed(node: NodeProto, path: Path, known: Mapping[str, TensorProto]) -> None:
    told = {a.name: a.i for a in node.attribute if a.type == AttributeProto.INT}
    k, n, bits, size = (told.get(name, default) for name, default in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0)))
    said = f"{path}: MatMulNBits '{node.name}' of K {k}, N {n}, {bits} bits and blocks of {size}"
    if min(k, n, size) < 1 or not 2 <= bits <= 8:
        raise ModelError(f"{said} is none that there can be; the file is damaged")
    dims = [list(known[name].dims) if name in known else None for name in node.input]
    if len(dims) > 1 and dims[1] is not None and 0 in dims[1]:
        return  # a projection that is left out
    blocks = -(-k // size)
    packed = () if told.get("weight_prepacked") else (n * blocks * -(-size * bits // 8),)
    expected = ((), packed, (n * blocks,), (n * blocks, n * -(-blocks * bits // 8)), (k, blocks * size), (n,))
    for name, shape, counts in zip(node.input, dims, expected, strict=False):
        if shape is not None and counts and math.prod(shape) not in counts:
            raise ModelError(f"{said} needs {counts[0]:,} values in '{name}', which has the shape {shape[:8]}; the file is damaged")
