"""The table of docs/exports.md: what differed or was not run is said, and weights that a reader compared count for the engine that runs the same file."""

from __future__ import annotations

import importlib
import json
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


def test_a_note_that_explains_a_figure_is_said(section: Any) -> None:
    file = {"format": "compressed-tensors", "type": None, "scheme": "int8-channel-sym+int8-token"}
    rounding = row("vLLM", None, 0.004, "against transformers with vLLM's rounding; its 24 linears alone are at most 5e-07 off; largest difference of a log-probability 1", **file)
    twin = row("vLLM", None, 6e-12, "against qforge; dequantized twin: nothing rounded; largest difference of a log-probability 3e-5", **file)
    found = [line.split(" | ")[-1].removesuffix(" |") for line in section(rounding, twin)]
    assert found == ["against transformers with vLLM's rounding; its 24 linears alone are at most 5e-07 off", "dequantized twin: nothing rounded"]


INT4, UINT4, INT8, FP8 = "int4-g32-sym", "int4-g32-asym", "int8-channel-sym", "fp8-e4m3-channel"
W8A8, FP8_TOKEN = f"{INT8}+int8-token", f"{FP8}+fp8-e4m3-token"
EXACT = [
    ("gguf", "f32", UINT4, "llama.cpp"), *(("onnx", "matmulnbits", text, engine) for text in (INT4, UINT4, INT8) for engine in ("onnxruntime", "onnxruntime-genai")),
    *(("onnx", "qdq", text, "onnxruntime") for text in (INT4, UINT4, INT8, FP8)), *(("openvino", None, text, "openvino") for text in (INT4, UINT4, INT8, FP8)),
    *(("compressed-tensors", None, text, "transformers") for text in (INT4, UINT4, INT8, FP8, "nvfp4", "mxfp4")), *(("mlx", None, text, "mlx-lm") for text in (INT4, UINT4, INT8)),
    *(("gptq", None, text, engine) for text in (INT4, UINT4, INT8) for engine in ("GPTQModel", "transformers")),
    *(("awq", None, text, engine) for text in (INT4, UINT4) for engine in ("GPTQModel", "transformers")), ("bitsandbytes", None, "nf4-g32@u8/g256:f32", "transformers"),
]  # fmt: skip
ROUNDING = [
    *(("gguf", kind, text, "llama.cpp") for kind, text in (("q4_0", INT4), ("q5_0", UINT4), ("q8_0", INT8), ("q4_k_m", INT8), ("q6_k", INT8))),
    ("onnx", "matmulnbits-level4", INT4, "onnxruntime"), *(("onnx", "qdq", text, "onnxruntime") for text in (W8A8, FP8_TOKEN)),
    *(("compressed-tensors", None, text, engine) for text in (W8A8, FP8_TOKEN) for engine in ("transformers", "vLLM")),
]  # fmt: skip
OPERATORS = {
    ("onnx", "matmulnbits", INT4): "1 Gather FLOAT, 42 MatMulNBits int4 level 1, 1 Transpose FLOAT",
    ("onnx", "matmulnbits", INT8): "1 Gather FLOAT, 42 MatMulNBits int8 level 1, 1 Transpose FLOAT",
    ("onnx", "qdq", INT4): "42 DequantizeLinear INT4, 1 Gather FLOAT, 1 Transpose FLOAT",
    ("onnx", "qdq", UINT4): "42 DequantizeLinear UINT4, 1 Gather FLOAT, 1 Transpose FLOAT",
    ("onnx", "qdq", W8A8): "42 DequantizeLinear INT8, 1 Gather FLOAT, 1 Transpose FLOAT",
    ("onnx", "qdq", FP8_TOKEN): "42 DequantizeLinear FLOAT8E4M3FN, 1 Gather FLOAT, 1 Transpose FLOAT",
    ("openvino", None, INT4): "1 weight f32, 42 weight i4",
    ("openvino", None, UINT4): "1 weight f32, 42 weight u4, 42 zero_point u4",
}


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/exports-stories15M.json").read_text())["rows"]
    return rows


def of(rows: list[dict[str, Any]], case: tuple[str, str | None, str, str]) -> list[dict[str, Any]]:
    return [r for r in rows if (r["format"], r["type"], r["scheme"], r["engine"]) == case and r["executed"]]


def test_the_saved_table_has_every_engine_and_nothing_that_failed(saved: list[dict[str, Any]]) -> None:
    assert [r for r in saved if r["failed"] or r["weights_equal"] is False] == []
    assert [case for case in [*EXACT, *ROUNDING] if not of(saved, case)] == []
    assert all(r["kl_mean"] < 1e-3 for case in EXACT for r in of(saved, case))
    told = {(r["format"], r["type"], r["scheme"]): r["note"] for r in saved if r["engine"] in ("onnxruntime, operator by operator", "openvino, weight by weight")}
    assert {case: told.get(case) for case in OPERATORS} == OPERATORS


def test_what_is_far_in_the_saved_table_is_near_where_nothing_is_rounded(saved: list[dict[str, Any]]) -> None:
    """llama.cpp and vLLM over the same weights, dequantized; ONNX Runtime's level 4 beside level 1; transformers beside itself with our rounding."""
    twins = [r for r in saved if "dequantized twin" in str(r["note"])]
    assert {(r["format"], r["type"], r["scheme"], r["engine"]) for r in twins} >= {c for c in ROUNDING if c[3] == "vLLM" or c[1] in ("q4_0", "q5_0")}
    same_rounding = [r for text in (W8A8, FP8_TOKEN) for r in of(saved, ("compressed-tensors", None, text, "transformers")) if r["note"].startswith("against transformers;")]
    assert len(same_rounding) == 2
    assert all(r["kl_mean"] < 1e-6 for r in [*twins, *same_rounding])
