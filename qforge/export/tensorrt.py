"""TensorRT engines, built from the same ONNX file that lies beside them and that ONNX Runtime checks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qforge.engines import tensorrt_build
from qforge.errors import MissingCapabilityError
from qforge.export.onnx import OnnxExporter
from qforge.export.refusal import refuse
from qforge.files import atomic_folder
from qforge.models.model import Model
from qforge.scheme import Number, Per, Scheme

ONNX_TYPE = "qdq-f16"


@dataclass(frozen=True, slots=True)
class TensorrtExporter:
    """The exporter (see docs/architecture.md).

    Attributes:
        type: GPU architectures to build for ahead of time, joined by `+` (`sm89`, `sm89+sm120`); `auto`: the GPU that is here.
    """

    type: str = "auto"
    name: str = "tensorrt"
    holds_kv_scales: ClassVar[bool] = False

    @property
    def targets(self) -> tuple[str, ...]:
        """Architectures by name; none for the GPU that is here."""
        return () if self.type == "auto" else tuple(self.type.split("+"))

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can.

        Raises:
            MissingCapabilityError: this machine lacks a package, or the GPU that `auto` builds for.
        """
        unknown = [t for t in self.targets if t not in tensorrt_build.ARCHITECTURES]
        if unknown:
            return f"TensorRT type '{self.type}' is not available; use auto, or architectures joined by +: {', '.join(tensorrt_build.ARCHITECTURES)}"
        for name, scheme in model.schemes.items():
            reason = scheme_problem(scheme)
            if reason:
                return f"{name}: {reason}"
        reason = OnnxExporter(ONNX_TYPE).check(model)
        lacking = None if reason else tensorrt_build.missing(self.targets)
        if lacking:
            raise MissingCapabilityError(f"export tensorrt: {lacking}")
        return reason

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write `onnx/` (see `OnnxExporter`) and `model.engine` to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not.
            ModelError: TensorRT refuses the graph.
            OutputError: the folder cannot be written.
        """
        refuse("TensorRT", self.check(model))
        assert model.spec is not None
        with atomic_folder(folder) as temporary:
            OnnxExporter(ONNX_TYPE).write(model, temporary / "onnx")
            shutil.copyfile(tensorrt_build.build(temporary / "onnx", model.spec, self.targets), temporary / tensorrt_build.ENGINE)
        return sorted(p for p in folder.rglob("*") if p.is_file())


def scheme_problem(scheme: Scheme) -> str | None:
    """Why TensorRT takes no linear of this scheme; None if it does.

    Source: TensorRT's operator reference, Quantize and Dequantize: no zero points; blocks for 4-bit integers only; constant scales of activations.
    """
    if not scheme.symmetric:
        return f"TensorRT has no zero points, and {scheme} has; use a -sym scheme"
    if scheme.number is Number.FP8_E5M2:
        return f"TensorRT has FP8 as e4m3 only, not {scheme.number}"
    if scheme.bits > 4 and scheme.granularity.per not in (Per.CHANNEL, Per.TENSOR):
        return f"TensorRT has one scale a channel or tensor for 8-bit weights, not {scheme.granularity}"
    if scheme.activations is not None and not scheme.activations.static:
        return f"TensorRT rounds activations with stored scales only, and {scheme} finds them as it runs"
    return None
