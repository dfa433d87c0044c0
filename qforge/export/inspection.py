"""What a model file holds: family, schemes, bits per weight, sizes, metadata, provenance; and whether it is sound."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qforge.engines.onnx_runtime import MODEL as ONNX
from qforge.engines.openvino_runtime import MODEL as OPENVINO
from qforge.errors import ModelError
from qforge.export import triton_server
from qforge.export.hf import weight_shape
from qforge.export.inspect_onnx import inspect_onnx
from qforge.export.inspect_openvino import inspect_openvino
from qforge.export.provenance import PROVENANCE, read_provenance
from qforge.files import size_of
from qforge.models.assets import end_ids
from qforge.models.config import quantization_of, read_json
from qforge.models.gguf_header import GgufHeader, read_gguf_header
from qforge.models.model import Model, open_model
from qforge.models.shards import Shards, find
from qforge.ops.select import explained
from qforge.runtime.decoder import supports

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings")


def inspect(path: Path, *, check: bool = False) -> dict[str, Any]:
    """Describe a Hugging Face directory, an artifact (or the folder of a run), a checkpoint of another program, a `.gguf` file, an ONNX or OpenVINO export or its `.onnx` or `.xml`
    file, or a model repository of Triton's server.

    Headers, sizes, offsets and shapes are always checked against each other.

    Args:
        check: read every tensor as well: floats must be finite, codes and scales must fit their scheme.

    Raises:
        ModelError: there is nothing there, it is of an unknown kind, or it is damaged.
    """
    if not path.exists():
        raise ModelError(f"there is nothing at '{path}'; give a model directory, the folder of a run, or a .gguf file")
    path = _model_of(path)
    if path.is_file():
        if path.suffix == ".onnx":
            return inspect_onnx(path, check=check)
        if path.name == OPENVINO:
            return inspect_openvino(path, check=check)
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but no .gguf, .onnx or {OPENVINO}; give a model directory, the folder of a run, or such a file")
        return _gguf(read_gguf_header(path), check)
    return _directory(path, check)


def _model_of(path: Path) -> Path:
    """The file, or the folder of a checkpoint, that is meant by a folder: of a run, of an export, a Triton repository."""
    version = path / triton_server.MODEL / triton_server.VERSION
    if (version.parent / triton_server.CONFIG).exists():
        path = version / triton_server.CHECKPOINT if (version / triton_server.CHECKPOINT).exists() else version
    for name in (ONNX, OPENVINO):
        if (path / name).exists():
            return path / name
    if not (path / "config.json").exists() and (path / "model" / "config.json").exists():
        return path / "model"
    return path


def _directory(path: Path, check: bool) -> dict[str, Any]:
    model = open_model(str(path))
    shards = Shards(find(path))
    parameters = sum(math.prod(model.weights.info(n).shape) for n in model.weights.names())
    stored = [shards.info(n) for n in shards.names()]
    tensor_bytes = sum(math.prod(i.shape) * i.dtype.itemsize for i in stored)
    linears = [_linear(model, name) for name in model.schemes]
    end_ids(path, model.config)  # of generation_config.json
    quantized = sum(entry["weights"] for entry in linears)
    if check:
        _read_all(model)
        model.tokenizer()
    return {
        "path": str(path),
        "kind": _kind(path),
        "family": model.config.model_type,
        "architectures": list(model.config.architectures or []),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": parameters,
        "size_bytes": size_of(path),
        "tensor_bytes": tensor_bytes,
        "bits_per_weight": round(8 * tensor_bytes / parameters, 4),
        "quantized_fraction": round(quantized / parameters, 4),
        "quantized_bits_per_weight": round(sum(e["bits_per_weight"] * e["weights"] for e in linears) / quantized, 4) if quantized else None,
        "schemes": _counted([entry["scheme"] for entry in linears]),
        "kv_cache": {"type": "fp8", "scales": dict(model.kv_scales)} if model.kv_scales else None,
        "tensor_types": _counted([str(i.dtype).removeprefix("torch.") for i in stored]),
        "metadata": {key: getattr(model.config, key, None) for key in _SIZES},
        "linears": linears,
        "runtime": {"runs": supports(model.spec) is None, "reason": supports(model.spec)},
        "provenance": read_provenance(path),
        "sound": True,
        "checked": "all tensors read" if check else "headers, sizes and shapes",
    }


def _kind(path: Path) -> str:
    method = (quantization_of(path, read_json(path / "config.json")) or {}).get("quant_method")
    if (path / PROVENANCE).exists():
        return "qforge artifact"
    return f"{method} checkpoint" if method else "Hugging Face model"


def _linear(model: Model, name: str) -> dict[str, Any]:
    scheme, shape = model.schemes[name], weight_shape(model, name)
    weights = shape[0] * shape[1]
    bits = round(scheme.storage_bits(*shape) / weights, 4)
    return {"name": name, "scheme": str(scheme), "shape": list(shape), "weights": weights, "bits_per_weight": bits, "kernels": explained(scheme, (shape[0], shape[1]))}


def _read_all(model: Model) -> None:
    for name in model.schemes:
        model.linear(name)
    for name in model.weights.names():
        tensor = model.weights.read(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise ModelError(f"tensor '{name}' holds values that are not finite; the file is damaged or was made from such weights")


def _gguf(header: GgufHeader, check: bool) -> dict[str, Any]:
    parameters = sum(math.prod(t.shape) for t in header.tensors.values())
    tensor_bytes = sum(t.nbytes for t in header.tensors.values())
    if check:
        _read_all(open_model(str(header.path)))
    metadata = {key: value for key, value in header.metadata.items() if isinstance(value, (str, int, float, bool)) and len(str(value)) <= 200}
    matrices = [t for t in header.tensors.values() if len(t.shape) > 1]
    return {
        "path": str(header.path),
        "kind": "GGUF file",
        "family": header.architecture,
        "parameters": parameters,
        "size_bytes": size_of(header.path),
        "tensor_bytes": tensor_bytes,
        "bits_per_weight": round(8 * tensor_bytes / max(parameters, 1), 4),
        "schemes": _counted([t.type.name for t in matrices]),
        "tensor_types": _counted([t.type.name for t in header.tensors.values()]),
        "metadata": metadata,
        "tensors": [{"name": t.name, "type": t.type.name, "shape": list(t.shape)} for t in header.tensors.values()],
        "provenance": None,
        "sound": True,
        "checked": "all tensors read" if check else "header, sizes and offsets",
    }


def _counted(items: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda pair: (-pair[1], pair[0])))


def _kernels(linears: list[dict[str, Any]]) -> dict[str, str]:
    """By kind of activations: which kernels run how many linears here."""
    kinds = linears[0].get("kernels", {}) if linears else {}
    return {kind: ", ".join(f"{name} ({count})" for name, count in _counted([e["kernels"][kind] for e in linears]).items()) for kind in kinds}


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a person reads."""
    yield f"{found['kind']}: {found['family']}, {found['parameters']:,} parameters, {found['size_bytes'] / 1e6:,.1f} MB, {found['bits_per_weight']:.2f} bits per weight"
    if found.get("quantized_bits_per_weight"):
        yield f"quantized:  {found['quantized_fraction']:.1%} of the weights, at {found['quantized_bits_per_weight']:.3f} bits each, scales included"
    if found["schemes"]:
        of = {"GGUF file": "matrices", "ONNX model": "nodes"}.get(found["kind"], "linears")
        yield f"schemes:    {', '.join(f'{scheme} ({count} {of})' for scheme, count in found['schemes'].items())}"
    if found.get("kv_cache"):
        yield f"cache:      keys and values as {found['kv_cache']['type']}, scales for {len(found['kv_cache']['scales'])} layers"
    for kind, names in _kernels(found.get("linears", [])).items():
        yield f"kernels:    {names} with --activations {kind}"
    if found.get("runtime", {}).get("reason"):
        yield f"runtime:    {found['runtime']['reason']}; transformers runs it"
    yield f"tensors:    {', '.join(f'{count} {kind}' for kind, count in found['tensor_types'].items())}"
    for key, value in found["metadata"].items():
        if value is not None:
            yield f"            {key} = {value}"
    if found["provenance"]:
        yield "provenance:"
        for key, value in found["provenance"].items():
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"            {key} = {text if len(text) <= 100 else text[:97] + '...'}"
    yield f"sound:      yes ({found['checked']})"
