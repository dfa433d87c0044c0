"""Writing models for other programs, and reading back what was written with readers that are not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from qforge.errors import UnsupportedError
from qforge.export.artifact import ArtifactExporter
from qforge.export.ascend import AscendExporter
from qforge.export.awq import AwqExporter
from qforge.export.gguf import GgufExporter
from qforge.export.gguf_mix import GgufMixExporter
from qforge.export.gguf_types import MIXES
from qforge.export.gptq import GptqExporter
from qforge.export.mlx import MlxExporter
from qforge.export.onnx import OnnxExporter
from qforge.export.openvino import OpenvinoExporter
from qforge.export.tensorrt import TensorrtExporter
from qforge.export.triton_server import TritonExporter
from qforge.export.trtllm import TrtLlmExporter
from qforge.models.model import Model

__all__ = ["Exporter", "available", "exporter"]


class Exporter(Protocol):
    """Writes an opened model in one format."""

    @property
    def name(self) -> str:
        """The format's name, as a recipe writes it."""

    @property
    def holds_kv_scales(self) -> bool:
        """Whether what is written holds the scales of keys and values that a model has, so that its engine rounds them as the model says."""

    def check(self, model: Model) -> str | None:
        """None, or why the model cannot be written."""

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the files into `folder` and return their paths."""


_PLAIN: dict[str, Exporter] = {
    e.name: e
    for e in (
        GptqExporter(),
        AwqExporter(),
        ArtifactExporter("compressed-tensors"),
        ArtifactExporter("bitsandbytes"),
        OpenvinoExporter(),
        MlxExporter(),
        AscendExporter(),
        TrtLlmExporter(),
    )
}


def available() -> list[str]:
    """Formats that can be written today."""
    return ["gguf", "onnx", "tensorrt", "triton", *_PLAIN]


def exporter(format_name: str, type_name: str | None = None) -> Exporter:
    """The exporter of a recipe's `export` entry.

    Raises:
        UnsupportedError: a format, or a type of one, that is not available.
    """
    if format_name == "gguf":
        return GgufMixExporter(type_name) if type_name in MIXES else GgufExporter(type_name or "auto")
    if format_name in _PLAIN:
        if type_name is not None:
            raise UnsupportedError(f"export {format_name} takes no type ('{type_name}' was given); leave it out")
        return _PLAIN[format_name]
    if format_name == "onnx":
        return OnnxExporter(type_name or "auto")
    if format_name == "tensorrt":
        return TensorrtExporter(type_name or "auto")
    if format_name == "triton":
        return TritonExporter(type_name or "onnx")
    raise UnsupportedError(f"export {format_name} is not available; available: {', '.join(available())}")
