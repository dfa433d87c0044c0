"""What an ONNX file holds, and whether it is sound: operators with the types of their weights, inputs and outputs, and every weight's place in the data beside it."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qforge.engines import onnx_runtime
from qforge.engines.opening import check_opens
from qforge.errors import MissingCapabilityError, ModelError
from qforge.export.finite import check_finite
from qforge.export.ranges import check_apart
from qforge.models.assets import VOCABULARIES, load_tokenizer
from qforge.models.config import read_json
from qforge.models.weights import MOST_DIMENSIONS

_MOST_BYTES = (1 << 31) - 1  # protobuf's limit of a message
_HALF_BYTES = ("INT4", "UINT4", "FLOAT4E2M1")
_UNSIZED = ("UNDEFINED", "STRING")


def inspect_onnx(path: Path, *, check: bool = False) -> dict[str, Any]:
    """Describe a `.onnx` file; the data beside it must be there, whole and where the file says.

    Args:
        check: read the data, too: floats, scales among them, must be finite.

    Raises:
        MissingCapabilityError: the onnx package is not installed.
        ModelError: it is no ONNX model, or damaged.
    """
    if importlib.util.find_spec("onnx") is None:
        raise MissingCapabilityError("the package onnx reads ONNX files and is not installed here: pip install 'qforge[onnx]'")
    from onnx import TensorProto

    from qforge.export.onnx_genai_soundness import check_genai
    from qforge.export.onnx_soundness import check_graph, stored_tensors
    from qforge.export.verify_onnx import Stored

    model = _parsed(path)
    stored = Stored(path.parent, {t.name: t for t in model.graph.initializer}, list(model.graph.node), {p.key: p.value for p in model.metadata_props})
    places: list[tuple[Path, int, int]] = []
    tensor_bytes = sum(_placed(tensor, path, places) for tensor in stored_tensors(model.graph))
    files: dict[Path, list[tuple[int, int]]] = {}
    for file, begin, length in places:
        files.setdefault(file, []).append((begin, length))
    for file, ranges in files.items():
        check_apart(ranges, file)
    check_graph(model, path)
    check_genai(model, path)
    counted = _parameters(stored)
    opened = ""
    if check:
        seen: set[tuple[object, ...]] = set()
        for tensor in stored_tensors(model.graph):
            key = (*_external(tensor, path), tensor.data_type) if tensor.data_location == TensorProto.EXTERNAL else (tensor.name,)
            if key not in seen:
                check_finite(_values(tensor, path), f"{path}: weight '{tensor.name}'")
            seen.add(key)
        if any((path.parent / name).exists() for name in VOCABULARIES):
            load_tokenizer(path.parent)
        opened = _opened(path, path.stat().st_size + tensor_bytes)
    return {
        "path": str(path),
        "kind": "ONNX model",
        "family": _family(path),
        "parameters": sum(counted.values()),
        "size_bytes": sum(p.stat().st_size for p in {path, *files}),
        "tensor_bytes": tensor_bytes,
        "bits_per_parameter": round(8 * tensor_bytes / max(sum(counted.values()), 1), 4),
        "schemes": _schemes(stored.operators()),
        "tensor_types": dict(Counter(TensorProto.DataType.Name(stored.initializers[n].data_type) for n in counted).most_common()),
        "metadata": {**stored.metadata, "opsets": ", ".join(f"{o.domain or 'ai.onnx'} {o.version}" for o in model.opset_import)},
        "operators": dict(sorted(stored.operators().items())),
        "inputs": [i.name for i in model.graph.input],
        "outputs": [o.name for o in model.graph.output],
        "provenance": None,
        "sound": True,
        "checked": f"all tensors read{opened}" if check else "graph, sizes and offsets",
    }


def _opened(path: Path, size: int) -> str:
    """Refuse what ONNX Runtime refuses, where it is installed; it knows every operator's types and shapes. Says so."""
    if onnx_runtime.missing() is not None:
        return ""
    try:
        check_opens(onnx_runtime.NAME, path, size)
    except ModelError as e:
        if "symbolic link" in str(e):  # as all files in the hub's cache are; it takes data of some graphs from files alone
            return ""
        raise
    return ", opened by ONNX Runtime"


def _parsed(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes, and no ONNX file can have more than {_MOST_BYTES:,}")
    model = ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as e:
        raise ModelError(f"{path} is no ONNX model, or damaged: {' '.join(str(e).split()) or 'it cannot be decoded'}") from e
    if not model.graph.node:
        raise ModelError(f"{path} is no ONNX model, or damaged: its graph has no nodes")
    if not all(isinstance(text, str) for text in _texts(model)):
        raise ModelError(f"{path} is damaged: it holds names that are not UTF-8")
    return model


def _texts(model: Any) -> Iterator[str | bytes]:
    """Every name and text that is looked at; protobuf gives bytes where one is not UTF-8."""
    for tensor in model.graph.initializer:
        yield tensor.name
        yield from (text for e in tensor.external_data for text in (e.key, e.value))
    for node in model.graph.node:
        yield from (node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
    yield from (end.name for end in (*model.graph.input, *model.graph.output))
    yield from (text for p in model.metadata_props for text in (p.key, p.value))
    yield from (o.domain for o in model.opset_import)


def _placed(tensor: Any, path: Path, places: list[tuple[Path, int, int]]) -> int:
    """Bytes of a weight, when they are all there; adds where they lie to `places`, if outside."""
    from onnx import TensorProto, helper

    try:
        kind = TensorProto.DataType.Name(tensor.data_type)
    except ValueError:
        kind = "UNDEFINED"
    if kind in _UNSIZED or len(tensor.dims) > MOST_DIMENSIONS or any(d < 0 for d in tensor.dims):
        raise ModelError(f"{path}: weight '{tensor.name}' has the type {kind} and the shape {list(tensor.dims)[:8]}, which is none that has a size")
    count = math.prod(tensor.dims)
    expected = -(-count // 2) if kind in _HALF_BYTES else count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    if tensor.data_location == TensorProto.EXTERNAL:
        places.append(_external(tensor, path))
        found = places[-1][2]
    elif tensor.HasField("raw_data"):
        found = len(bytes(tensor.raw_data))
    else:
        found = expected if count <= tensor.ByteSize() else -1  # typed fields hold small constants, each element at least one byte
    if found != expected:
        raise ModelError(f"{path}: weight '{tensor.name}' of shape {list(tensor.dims)[:8]} needs {expected:,} bytes and has {max(found, 0):,}; the file is damaged or cut")
    return int(expected)


def _external(tensor: Any, path: Path) -> tuple[Path, int, int]:
    """The file beside the model that holds a weight, where in it the weight begins, and its bytes."""
    told = {e.key: e.value for e in tensor.external_data}
    name = told.get("location", "")
    if Path(name).name != name or not name or "\0" in name:
        raise ModelError(f"{path}: weight '{tensor.name}' lies in '{name[:80]}', which is no file beside the model")
    file = path.parent / name
    if not file.is_file():
        raise ModelError(f"{path}: weight '{tensor.name}' lies in '{name[:80]}', and there is no such file")
    size = file.stat().st_size
    try:
        offset = int(told.get("offset", "0"))
        length = int(told.get("length", str(size - offset)))
    except ValueError as e:
        raise ModelError(f"{path}: the place of weight '{tensor.name}' is not told in numbers") from e
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(f"{path}: weight '{tensor.name}' lies at bytes {offset} to {offset + length} of '{name}', which has {size}")
    return file, offset, length


def _values(tensor: Any, path: Path) -> np.ndarray:
    """A float weight, as ml_dtypes has its type; empty for integers, where every bit pattern is a code."""
    from onnx import TensorProto, helper, numpy_helper

    if helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "fV":  # V: bfloat16, FP8 and FP4 to numpy
        return np.empty(0)
    if tensor.data_location == TensorProto.EXTERNAL:  # onnx would refuse a link, as every file of the hub's cache is
        file, offset, length = _external(tensor, path)
        tensor = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, raw_data=np.fromfile(file, np.uint8, length, offset=offset).tobytes())
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except Exception as e:  # onnx raises many kinds
        raise ModelError(f"{path}: weight '{tensor.name}' cannot be read: {' '.join(str(e).split())[:200]}") from e


def _parameters(stored: Any) -> dict[str, int]:
    """How many weights each initializer stands for; scales, zero points and constants of the graph are none."""
    from qforge.export.onnx_graph import attribute

    counted = {name: math.prod(t.dims) for name, t in stored.initializers.items() if not name.startswith(("/constants/", "model.rope."))}
    for node in stored.nodes:
        if node.op_type == "MatMulNBits" and len(node.input) > 1 and node.input[1] in counted:
            counted[node.input[1]] = int(attribute(node, "K") or 0) * int(attribute(node, "N") or 0)
        if node.op_type in ("MatMulNBits", "DequantizeLinear", "QuantizeLinear"):
            for name in list(node.input)[2 if node.op_type == "MatMulNBits" else 1 :]:
                counted.pop(name, None)
    return counted


def _schemes(operators: Mapping[str, int]) -> dict[str, int]:
    """The operators that hold quantized weights."""
    return {kind: count for kind, count in sorted(operators.items()) if kind.startswith(("MatMulNBits", "DequantizeLinear "))}


def _family(path: Path) -> str:
    """What `genai_config.json` beside the file calls the model."""
    beside = path.parent / "genai_config.json"
    about = read_json(beside).get("model") if beside.exists() else None
    return str(about.get("type", "decoder")) if isinstance(about, dict) else "decoder"
