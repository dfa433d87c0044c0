"""The table of docs/exports.md: what differed or was not run is said, and weights that a reader compared count for the engine that runs the same file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    module = importlib.import_module("export_table")
    return lambda *rows: module._section({"model": "m", "positions": 2, "text": "t", "date": "d", "environment": {"cores": 2, "cpu": "CPU"}, "rows": list(rows)}).splitlines()[4:]


def row(engine: str, equal: bool | None = None, kl: float | None = None, note: str | None = None, **more: Any) -> dict[str, Any]:
    figures = {"kl_mean": kl, "top1_agreement": None if kl is None else 0.875, "positions": None if kl is None else 2, "executed": kl is not None}
    return {"format": "gguf", "type": "q4_0", "scheme": "int4-g32-sym", "engine": engine, "version": "1", "weights_equal": equal, "note": note, "failed": None, **figures, **more}


def test_a_row_is_an_engine_that_ran_the_file(section: Any) -> None:
    found = section(row("gguf package", True), row("llama.cpp", True, 0.00162, "against qforge; fp32 cache", version="xllamacpp 7"))
    assert found == ["| gguf q4_0 | int4-g32-sym | llama.cpp 7 | equal | 1.6e-03 | 87.5 % |  |"]


def test_what_failed_is_said(section: Any) -> None:
    ran = row("llama.cpp", False, 0.5, "against qforge", failed="weights differ")
    assert section(row("gguf package", True), ran) == ["| gguf q4_0 | int4-g32-sym | llama.cpp 1 | **unequal** | 5.0e-01 | 87.5 % | weights differ |"]
    left_out = row("none", note="llama.cpp: not installed", version="", failed="not run")
    assert section(row("gguf package", True), left_out) == ["| gguf q4_0 | int4-g32-sym | not run | equal | | | llama.cpp: not installed |"]


def test_operators_and_their_weights_stand_beside_the_run(section: Any) -> None:
    file = {"format": "onnx", "type": "qdq"}
    weights = row("onnxruntime, operator by operator", False, note="42 DequantizeLinear INT4", **file)
    run, other = (row("onnxruntime", None, 1e-12, f"against {who}; fp32", **file) for who in ("qforge", "transformers"))
    elsewhere = row("onnxruntime, operator by operator", True, note="other file", format="onnx", type="matmulnbits")
    assert section(weights, elsewhere, run, other) == [
        "| onnx qdq | int4-g32-sym | onnxruntime 1 | **unequal** | 1.0e-12 | 87.5 % | 42 DequantizeLinear INT4 |",
        "| onnx qdq | int4-g32-sym | onnxruntime 1 | **unequal** | 1.0e-12 | 87.5 % | 42 DequantizeLinear INT4; against transformers, which rounds the same activations |",
    ]
