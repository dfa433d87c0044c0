"""What was written, read back and run by programs that are not ours: which of them reads which format."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from qforge.engines import checkpoints, foreign, llama_cpp
from qforge.engines.base import Scorer
from qforge.engines.tensorrt_build import ENGINE
from qforge.export import verify_checkpoint, verify_packed
from qforge.export.imatrix import FILE as IMATRIX
from qforge.export.verify_gguf import verify_gguf
from qforge.export.verify_triton import SERVER, verify_triton
from qforge.models.model import Model
from qforge.types import Verification

# What reads and runs exports in this Python.
_PACKAGES = (
    "bitsandbytes", "compressed-tensors", "gguf", "mlx", "mlx-lm", "onnx", "onnxruntime", "onnxruntime-genai", "openvino", "safetensors",
    "tensorrt", "tensorrt-rtx", "tritonclient",
)  # fmt: skip


def verify(format_name: str, paths: Sequence[Path], model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read an export back.

    Args:
        format_name: of an exporter.
        paths: the files that it wrote.
        model: what was exported, opened from disk.
        scorer: our runtime (or transformers) over the same model.
        prompts: token ids; the engines are compared at the token after each (`seeded_prompts`).

    Returns:
        What was verified, and which verifiers were left out, with the reason.
    Raises:
        ModelError: a foreign reader cannot read the file.
    """
    if format_name == "gguf":
        return verify_gguf(next(p for p in paths if p.suffix == ".gguf" and p.name != IMATRIX), model, scorer, prompts)
    if format_name == "openvino":
        from qforge.export.verify_openvino import verify_openvino

        return verify_openvino(next(p for p in paths if p.suffix == ".xml").parent, model, scorer, prompts)
    if format_name == "onnx":
        from qforge.export.verify_onnx import verify_onnx

        return verify_onnx(next(p for p in paths if p.suffix == ".onnx").parent, model, scorer, prompts)
    if format_name == "tensorrt":
        from qforge.export.verify_tensorrt import verify_tensorrt

        return verify_tensorrt(next(p for p in paths if p.name == ENGINE).parent, model, scorer, prompts)
    if format_name == "triton":
        return verify_triton(next(p for p in paths if p.name == "config.pbtxt").parents[1], model, scorer, prompts)
    folder = next(p for p in paths if p.name == "config.json").parent
    if format_name in verify_packed.FORMATS:
        return verify_packed.verify_packed(format_name, folder, model)
    return verify_checkpoint.verify_checkpoint(format_name, folder, model, scorer, prompts)


def versions() -> list[str]:
    """Packages that read and run exports, those that are here, with their versions."""
    found = []
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    elsewhere = {llama_cpp.PACKAGE: llama_cpp.interpreter(), "gptqmodel": checkpoints.interpreter("gptqmodel")}
    return found + [foreign.version_of(python, name) for name, python in elsewhere.items() if python is not None]


def lasting(left_out: Sequence[str], missing: Sequence[str | None]) -> bool:
    """Whether the same would be left out again: for want of an engine that is `missing`, or that never runs here. Other reasons, such as time and memory, may pass."""
    known = [*filter(None, missing), SERVER, *verify_packed.FORMATS.values()]
    return all(any(why in reason for why in known) for reason in left_out)
