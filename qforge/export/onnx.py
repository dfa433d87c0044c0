"""ONNX models: a decoder with a key-value cache, the integers of an artifact unchanged, with what onnxruntime-genai needs to generate from it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from qforge.errors import MissingCapabilityError
from qforge.export.hf import copy_assets, weight_shape, write_json
from qforge.export.onnx_genai import genai_config
from qforge.export.refusal import refuse
from qforge.files import atomic_folder
from qforge.layouts.onnx_blocks import MatMulNBits, OnnxDequantize
from qforge.models.model import Model
from qforge.runtime.decoder import supports
from qforge.scheme import ScaleType, Scheme
from qforge.types import ModelSpec

LEVELS = {"matmulnbits": 1, "matmulnbits-level4": 4}
STANDARD = {"qdq": torch.float32, "qdq-f16": torch.float16}
TYPES = ("auto", *LEVELS, *STANDARD)
_ROTARY = 16  # GroupQueryAttention's: head sizes are multiples of it


@dataclass(frozen=True, slots=True)
class OnnxExporter:
    """The exporter (see docs/architecture.md).

    Attributes:
        type: `matmulnbits`: ONNX Runtime's own operators, computed in fp32 (accuracy level 1); `matmulnbits-level4`: the same, with activations rounded to 8 bits as it runs;
            `qdq`: standard operators (opset 21), quantized weights through DequantizeLinear, computed in fp32; `qdq-f16`: the same, computed in fp16;
            `auto`: matmulnbits where it holds every scheme, else qdq.
    """

    type: str = "auto"
    name: str = "onnx"
    holds_kv_scales: ClassVar[bool] = False

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can.

        Raises:
            MissingCapabilityError: the onnx package is not installed.
        """
        if self.type not in TYPES:
            return f"ONNX type '{self.type}' is not available; use one of {', '.join(TYPES)}"
        if importlib.util.find_spec("onnx") is None:
            raise MissingCapabilityError("export onnx: the package onnx is not installed here: pip install 'qforge[onnx]'")
        reason = supports(model.spec)
        if reason is not None or model.spec is None:
            return f"no ONNX decoder for this model: {reason}"
        if model.spec.experts is not None:
            return "no ONNX decoder for this model: it is a mixture of experts"
        return self._problem(model, self.chosen(model))

    def chosen(self, model: Model) -> str:
        """The type that is written."""
        if self.type != "auto":
            return self.type
        return "matmulnbits" if self._problem(model, "matmulnbits") is None else "qdq"

    @staticmethod
    def _problem(model: Model, kind: str) -> str | None:
        assert model.spec is not None
        rotated = {rope.turned(model.spec.head_dim) for rope in model.spec.layer_ropes} | {model.spec.head_dim}
        if kind in LEVELS and (odd := next((size for size in rotated if size % _ROTARY), None)):
            return f"GroupQueryAttention rotates heads whose size is a multiple of {_ROTARY}, and this model's is {odd}; use type qdq"
        for name, scheme in model.schemes.items():
            reason = _scheme_problem(kind, scheme, *weight_shape(model, name))
            if reason:
                return f"{name}: {reason}"
        return None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write `model.onnx`, `model.onnx.data`, `genai_config.json` and the tokenizer to `folder`, which it replaces; one linear in memory at a time.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("ONNX", self.check(model))
        assert model.spec is not None
        kind = self.chosen(model)
        with atomic_folder(folder) as temporary:
            _write_graph(model, model.spec, kind, temporary)
            write_json(temporary / "genai_config.json", genai_config(model, model.spec, positions=kind in STANDARD))
            copy_assets(model.assets, temporary)
        return sorted(p for p in folder.rglob("*") if p.is_file())


def _scheme_problem(kind: str, scheme: Scheme, out_features: int, in_features: int) -> str | None:
    if kind in LEVELS:
        return MatMulNBits().supports(scheme) or MatMulNBits().problem_with(out_features, in_features)
    reason = OnnxDequantize().supports(scheme)
    if reason is None and STANDARD[kind] is torch.float16 and scheme.scale.type not in (ScaleType.F16, ScaleType.F16BF16):
        return f"type {kind} stores scales in fp16, which does not hold {scheme.scale} exactly (type qdq does)"
    return reason


def _write_graph(model: Model, spec: ModelSpec, kind: str, folder: Path) -> None:
    from qforge.export import onnx_decoder
    from qforge.export.onnx_contrib import ContribParts
    from qforge.export.onnx_graph import Graph
    from qforge.export.onnx_linears import Linears
    from qforge.export.onnx_standard import StandardParts

    graph, compute = Graph(), STANDARD.get(kind, torch.float32)
    onnx_decoder.inputs(graph, spec, positions=kind in STANDARD, compute=compute)
    linears = Linears(model, graph, LEVELS.get(kind), compute)
    parts = (StandardParts if kind in STANDARD else ContribParts)(graph, spec, linears)
    onnx_decoder.outputs(graph, spec, onnx_decoder.decoder(graph, spec, linears, parts), compute)
    graph.write(folder, _metadata(kind, model.schemes))


def _metadata(kind: str, schemes: Mapping[str, Scheme]) -> dict[str, str]:
    return {"qforge.type": kind, "qforge.schemes": ", ".join(sorted({str(s) for s in schemes.values()})) or "none"}
