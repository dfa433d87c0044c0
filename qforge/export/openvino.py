"""OpenVINO IR: the decoder of our standard ONNX form with its integers as OpenVINO compresses weights and its cache as state, for OpenVINO GenAI and optimum-intel."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qforge.engines.openvino_runtime import MODEL
from qforge.errors import MissingCapabilityError
from qforge.export.hf import config_json, copy_assets, write_json
from qforge.export.onnx import OnnxExporter
from qforge.export.refusal import refuse
from qforge.files import atomic_folder
from qforge.models.model import Model


@dataclass(frozen=True, slots=True)
class OpenvinoExporter:
    """The exporter (see docs/architecture.md). Unlike the others it holds the whole packed model in memory: OpenVINO saves a model at once."""

    name: str = "openvino"
    holds_kv_scales: ClassVar[bool] = False

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can.

        Raises:
            MissingCapabilityError: openvino or the onnx package is not installed.
        """
        for package in ("onnx", "openvino"):
            if importlib.util.find_spec(package) is None:
                raise MissingCapabilityError(f"export openvino: the package {package} is not installed here: pip install 'qforge[openvino]'")
        return OnnxExporter("qdq").check(model)

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write `openvino_model.xml`, `openvino_model.bin`, config.json and the tokenizer to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("OpenVINO", self.check(model))
        import openvino

        from qforge.export import openvino_graph

        schemes = ", ".join(sorted({str(s) for s in model.schemes.values()})) or "none"
        with atomic_folder(folder) as temporary, tempfile.TemporaryDirectory(dir=temporary) as between:
            OnnxExporter("qdq").write(model, Path(between) / "onnx")
            built = openvino_graph.build(Path(between) / "onnx" / "model.onnx", model, {"schemes": schemes})
            openvino.save_model(built, temporary / MODEL, compress_to_fp16=False)
            del built
            write_json(temporary / "config.json", config_json(model.config, model.dtype))
            copy_assets(model.assets, temporary)
        return sorted(p for p in folder.rglob("*") if p.is_file())
