"""What a model file holds: family, schemes, bits per weight, sizes, metadata, provenance; and whether it is sound."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from qforge.engines.onnx_runtime import MODEL as ONNX
from qforge.engines.openvino_runtime import MODEL as OPENVINO
from qforge.errors import ModelError, QforgeError
from qforge.export import triton_server
from qforge.export.hf import weight_shape
from qforge.export.inspect_onnx import inspect_onnx
from qforge.export.inspect_openvino import inspect_openvino
from qforge.export.provenance import PROVENANCE, read_provenance
from qforge.files import size_of
from qforge.models import language_model
from qforge.models import skeleton as skeletons
from qforge.models.assets import end_ids
from qforge.models.config import quantization_of, read_json
from qforge.models.gguf_config import gguf_config
from qforge.models.gguf_header import GgufHeader, read_gguf_header
from qforge.models.gguf_source import GgufSource
from qforge.models.locate import model_folder
from qforge.models.model import Model, open_model
from qforge.models.shards import Shards, find
from qforge.models.spec import model_spec
from qforge.models.weights import WeightSource
from qforge.ops.select import dense_kernel, explained, short
from qforge.runtime.decoder import supports
from qforge.scheme import Scheme
from qforge.types import ModelSpec

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
    return model_folder(path)


def _directory(path: Path, check: bool) -> dict[str, Any]:
    model = open_model(str(path))
    shards = Shards(find(path))
    parameters = sum(math.prod(model.weights.info(n).shape) for n in model.weights.names())
    held = shards if model.whole is None else language_model.tensors_of(shards, str(path))
    stored = [held.info(n) for n in held.names()]
    tensor_bytes = sum(math.prod(i.shape) * i.dtype.itemsize for i in stored)
    linears = [_linear(name, model.schemes[name], weight_shape(model, name)) for name in model.schemes]
    end_ids(path, model.config)  # of generation_config.json
    quantized = sum(entry["weights"] for entry in linears)
    if check:
        _read_all(model)
        model.tokenizer()
    return {
        "path": str(path),
        "kind": _kind(path),
        "family": model.config.model_type,
        "whole": model.whole,
        "architectures": list(model.config.architectures or []),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": parameters,
        "size_bytes": size_of(path),
        "tensor_bytes": tensor_bytes,
        "bits_per_parameter": round(8 * tensor_bytes / parameters, 4),
        "quantized_fraction": round(quantized / parameters, 4),
        "quantized_bits_per_weight": round(sum(e["bits_per_weight"] * e["weights"] for e in linears) / quantized, 4) if quantized else None,
        "schemes": _counted([entry["scheme"] for entry in linears]),
        "kv_cache": {"type": "fp8", "scales": dict(model.kv_scales)} if model.kv_scales else None,
        "tensor_types": _counted([str(i.dtype).removeprefix("torch.") for i in stored]),
        "metadata": {key: getattr(model.config, key, None) for key in _SIZES},
        "linears": linears,
        **_on_runtime(model.config, model.spec, model.schemes, model.weights, trust_remote_code=model.trust_remote_code),
        "provenance": read_provenance(path),
        "sound": True,
        "checked": "all tensors read" if check else "headers, sizes and shapes",
    }


def _kind(path: Path) -> str:
    method = (quantization_of(path, read_json(path / "config.json")) or {}).get("quant_method")
    if (path / PROVENANCE).exists():
        return "qforge artifact"
    return f"{method} checkpoint" if method else "Hugging Face model"


def _linear(name: str, scheme: Scheme, shape: Sequence[int]) -> dict[str, Any]:
    weights = shape[0] * shape[1]
    bits = round(scheme.storage_bits(shape[0], shape[1]) / weights, 4)
    return {"name": name, "scheme": str(scheme), "shape": list(shape), "weights": weights, "bits_per_weight": bits, "kernels": explained(scheme, (shape[0], shape[1]))}


def _on_runtime(config: PretrainedConfig, spec: ModelSpec | None, schemes: Mapping[str, Scheme], weights: WeightSource, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Whether the built-in runtime runs the model, and what it runs linears without a scheme with, the head included."""
    reason = supports(spec)
    found: dict[str, Any] = {"unquantized": [], "runtime": {"runs": reason is None, "reason": reason}}
    if reason is not None:
        return found
    skeleton, stored = skeletons.build(config, trust_remote_code=trust_remote_code), set(weights.names())
    kernel = dense_kernel()
    for name in dict.fromkeys((*skeleton.linears, *skeleton.routers)):
        weight = f"{name}.weight"
        if name not in schemes:
            held = weight if weight in stored else skeleton.tied.get(weight)
            if held not in stored:
                raise ModelError(f"tensor '{weight}' is missing")
            dtype = str(weights.info(held).dtype).removeprefix("torch.")
            found["unquantized"].append({"name": name, "dtype": dtype, "shape": list(skeleton.shapes[weight]), "kernel": kernel})
    return found


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
        model = open_model(str(header.path))
        _read_all(model)
        model.tokenizer()
    metadata = {key: _printable(value) for key, value in header.metadata.items() if isinstance(value, (str, int, float, bool)) and len(str(value)) <= 200}
    matrices = [t for t in header.tensors.values() if len(t.shape) > 1]
    return {
        "path": str(header.path),
        "kind": "GGUF file",
        "family": header.architecture,
        "parameters": parameters,
        "size_bytes": size_of(header.path),
        "tensor_bytes": tensor_bytes,
        "bits_per_parameter": round(8 * tensor_bytes / max(parameters, 1), 4),
        "schemes": _counted([t.type.name for t in matrices]),
        "tensor_types": _counted([t.type.name for t in header.tensors.values()]),
        "metadata": metadata,
        "tensors": [{"name": t.name, "type": t.type.name, "shape": list(t.shape)} for t in header.tensors.values()],
        **_gguf_on_runtime(header),
        "provenance": None,
        "sound": True,
        "checked": "all tensors read" if check else "header, sizes and offsets",
    }


def _printable(value: str | float) -> str | float:
    """JSON has no numbers that are not finite: these are texts."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _gguf_on_runtime(header: GgufHeader) -> dict[str, Any]:
    """The linears of blocks that hold integers, and all else that the runtime says of a model."""
    try:
        config = gguf_config(header)
        source = GgufSource(header, config, skeletons.build(config).linears)
        linears = [_linear(name, scheme, source.info(source.stored(name)).shape) for name, scheme in source.schemes.items()]
        return {"linears": linears, **_on_runtime(config, model_spec(config), source.schemes, source)}
    except QforgeError as e:  # the file may be sound, and be of a family that we do not read
        return {"linears": [], "unquantized": [], "runtime": {"runs": False, "reason": str(e)}}


def _counted(items: list[str]) -> dict[str, int]:
    return dict(sorted(Counter(items).items(), key=lambda pair: (-pair[1], pair[0])))


def _kernels(found: Mapping[str, Any]) -> Iterator[str]:
    """By kind of activations: which kernels run how many linears here; and those of what is not quantized. JSON has what others would bring, too."""
    linears = found.get("linears", [])
    for kind in linears[0].get("kernels", {}) if linears else ():
        names = _counted([short(e["kernels"][kind]) for e in linears])
        yield f"{', '.join(f'{name} ({count})' for name, count in names.items())} with --activations {kind}"
    for kernel, count in _counted([e["kernel"] for e in found.get("unquantized", [])]).items():
        yield f"{kernel} ({count}) for linears that are not quantized"


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a person reads."""
    family = f"{found['family']} (the language model of {found['whole']})" if found.get("whole") else found["family"]
    yield f"{found['kind']}: {family}, {found['parameters']:,} parameters, {found['size_bytes'] / 1e6:,.1f} MB, {found['bits_per_parameter']:.2f} bits per parameter"
    if found.get("quantized_bits_per_weight"):
        yield f"quantized:  {found['quantized_fraction']:.1%} of the weights, at {found['quantized_bits_per_weight']:.3f} bits each, scales included"
    if found["schemes"]:
        of = {"GGUF file": "matrices", "ONNX model": "nodes"}.get(found["kind"], "linears")
        yield f"schemes:    {', '.join(f'{scheme} ({count} {of})' for scheme, count in found['schemes'].items())}"
    if found.get("kv_cache"):
        yield f"cache:      keys and values as {found['kv_cache']['type']}, scales for {len(found['kv_cache']['scales'])} layers"
    for line in _kernels(found):
        yield f"kernels:    {line}"
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
