"""Model repositories for Triton Inference Server: `config.pbtxt` around the ONNX export, or around a checkpoint for its vLLM backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.export.artifact import ArtifactExporter
from qforge.export.onnx import OnnxExporter
from qforge.export.refusal import refuse
from qforge.files import atomic_folder, write_text
from qforge.models.model import Model
from qforge.models.names import HEAD

TYPES = ("onnx", "vllm")
MODEL, VERSION, CHECKPOINT = "model", "1", "checkpoint"
CONFIG, ENGINE = "config.pbtxt", "model.json"
_MOUNT = "/models"  # where Triton's own documentation mounts a repository; vLLM takes paths as the server sees them
_KINDS = {1: "TYPE_FP32", 7: "TYPE_INT64", 10: "TYPE_FP16"}  # TensorProto.DataType -> inference.DataType


@dataclass(frozen=True, slots=True)
class TritonExporter:
    """The exporter (see docs/architecture.md).

    Attributes:
        type: `onnx`: the ONNX export under the ONNX Runtime backend, the cache its inputs and outputs; `vllm`: the checkpoint under the vLLM backend, text in and out.
    """

    type: str = "onnx"
    name: str = "triton"

    @property
    def holds_kv_scales(self) -> bool:
        """See `Exporter.holds_kv_scales`."""
        return self.type == "vllm"

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can.

        Raises:
            MissingCapabilityError: the onnx package is not installed.
        """
        if self.type not in TYPES:
            return f"Triton type '{self.type}' is not available; use one of {', '.join(TYPES)}"
        if self.type == "onnx":
            return OnnxExporter().check(model)
        if HEAD in model.schemes:
            return "the output head is quantized, and vLLM 0.32 does not load such a compressed-tensors checkpoint; leave it as it is (quantize.ignore: [lm_head])"
        return ArtifactExporter("compressed-tensors").check(model)

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the repository: `model/config.pbtxt` and `model/1/`.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("Triton", self.check(model))
        with atomic_folder(folder) as temporary:
            version = temporary / MODEL / VERSION
            (_write_onnx if self.type == "onnx" else _write_vllm)(model, version)
            config = _onnx_config(version) if self.type == "onnx" else _vllm_config()
            write_text(temporary / MODEL / CONFIG, "\n".join(text_format(config)) + "\n")
        return sorted(p for p in folder.rglob("*") if p.is_file())


def _write_onnx(model: Model, version: Path) -> None:
    OnnxExporter().write(model, version)


def _write_vllm(model: Model, version: Path) -> None:
    ArtifactExporter("compressed-tensors").write(model, version / CHECKPOINT)
    served = {"model": f"{_MOUNT}/{MODEL}/{VERSION}/{CHECKPOINT}", "gpu_memory_utilization": 0.9}
    write_text(version / ENGINE, json.dumps(served, indent=2) + "\n")


def _onnx_config(version: Path) -> dict[str, Any]:
    import onnx

    graph = onnx.load(str(version / "model.onnx"), load_external_data=False).graph
    ends = {"input": [_end(v) for v in graph.input], "output": [_end(v) for v in graph.output]}
    return {"name": MODEL, "backend": "onnxruntime", "max_batch_size": 0, "default_model_filename": "model.onnx", **ends}


def _end(value: Any) -> dict[str, Any]:
    """A graph's input or output; the batch is a dimension like the others, because the cache's length is one that all sequences of a batch share."""
    tensor = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    return {"name": value.name, "data_type": Symbol(_KINDS[tensor.elem_type]), "dims": dims}


def _vllm_config() -> dict[str, Any]:
    """The backend adds its own inputs and outputs, and takes devices itself."""
    decoupled = {"decoupled": Symbol("true")}
    return {"name": MODEL, "backend": "vllm", "max_batch_size": 0, "model_transaction_policy": decoupled, "instance_group": [{"count": 1, "kind": Symbol("KIND_MODEL")}]}


class Symbol(str):
    """A value that protobuf's text format writes without quotes."""

    __slots__ = ()


def text_format(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The lines of a message in protobuf's text format: mappings are messages, lists repeat a field, lists of numbers stand in one line."""
    for name, value in message.items():
        if isinstance(value, Mapping) or (isinstance(value, Sequence) and value and isinstance(value[0], Mapping)):
            for one in [value] if isinstance(value, Mapping) else value:
                yield f"{indent}{name} {{"
                yield from text_format(one, indent + "  ")
                yield f"{indent}}}"
        else:
            plain = isinstance(value, (Symbol, int, list))
            yield f"{indent}{name}: {value if plain else json.dumps(value)}"
