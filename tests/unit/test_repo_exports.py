"""The table of docs/exports.md: what differed or was not run is said, and weights that a reader compared count for the engine that runs the same file."""

from __future__ import annotations

import importlib
import json
import re
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
    return {
        "format": "gguf",
        "type": "q4_0",
        "scheme": "int4-g32-sym",
        "engine": engine,
        "version": "1",
        "weights_equal": equal,
        "note": note,
        "failed": None,
        "tensors": None,
        **figures,
        **more,
    }


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
W8A8, FP8_TOKEN, FP8_TENSOR, FP8_BLOCK = f"{INT8}+int8-token", f"{FP8}+fp8-e4m3-token", "fp8-e4m3-tensor+fp8-e4m3-token", "fp8-e4m3-block32+fp8-e4m3-g32"
NF4 = "nf4-g32@u8/g256:f32"
EXACT = [
    ("gguf", "f32", UINT4, "llama.cpp"), *(("onnx", "matmulnbits", text, engine) for text in (INT4, UINT4, INT8) for engine in ("onnxruntime", "onnxruntime-genai")),
    *(("onnx", "qdq", text, engine) for text in (INT4, UINT4, INT8, FP8) for engine in ("onnxruntime", "onnxruntime-genai")),
    *(("openvino", None, text, "openvino") for text in (INT4, UINT4, INT8, FP8)),
    *(("compressed-tensors", None, text, "transformers") for text in (INT4, UINT4, INT8, FP8, "nvfp4", "mxfp4")), *(("mlx", None, text, "mlx-lm") for text in (INT4, UINT4, INT8)),
    *(("gptq", None, text, engine) for text in (INT4, UINT4, INT8) for engine in ("GPTQModel", "transformers")),
    *(("awq", None, text, engine) for text in (INT4, UINT4) for engine in ("GPTQModel", "transformers")), ("bitsandbytes", None, NF4, "transformers"),
]  # fmt: skip
GGUF = [("gguf", kind, text, "llama.cpp") for kind, text in (("q4_0", INT4), ("q5_0", UINT4), ("q8_0", INT8), ("q4_k_m", INT8), ("q6_k", INT8))]
LEVEL4 = [("onnx", "matmulnbits-level4", INT4, engine) for engine in ("onnxruntime", "onnxruntime-genai")]
ACTIVATIONS = [("onnx", "qdq", text, engine) for text in (W8A8, FP8_TOKEN) for engine in ("onnxruntime", "onnxruntime-genai")]
TRANSFORMERS = [("compressed-tensors", None, text, "transformers") for text in (W8A8, FP8_TOKEN, FP8_TENSOR, FP8_BLOCK)]
VLLM = [("compressed-tensors", None, text, "vLLM") for text in (W8A8, FP8_TOKEN)]
ROUNDING = [*GGUF, *LEVEL4, *ACTIVATIONS, *TRANSFORMERS, *VLLM]
READERS = ("gguf package", "onnxruntime, operator by operator", "openvino, weight by weight")
OPERATORS = {
    ("gguf", "f32", UINT4): "56 F32",
    ("gguf", "q4_0", INT4): "14 F32, 42 Q4_0",
    ("gguf", "q5_0", UINT4): "14 F32, 42 Q5_0",
    ("gguf", "q8_0", INT8): "14 F32, 42 Q8_0",
    ("gguf", "q4_k_m", INT8): "13 F32, 4 Q4_K, 34 Q5_0, 2 Q6_K, 3 Q8_0",  # 288 inputs are no multiple of 256: Q5_0 and Q8_0 stand in, as in llama.cpp
    ("gguf", "q6_k", INT8): "13 F32, 6 Q6_K, 37 Q8_0",
    **{("onnx", "matmulnbits", text): f"1 Gather FLOAT, 42 MatMulNBits {kind} level 1, 1 Transpose FLOAT" for text, kind in ((INT4, "int4"), (UINT4, "int4"), (INT8, "int8"))},
    ("onnx", "matmulnbits-level4", INT4): "1 Gather FLOAT, 42 MatMulNBits int4 level 4, 1 Transpose FLOAT",
    **{("onnx", "qdq", text): f"42 DequantizeLinear {kind}, 1 Gather FLOAT, 1 Transpose FLOAT" for text, kind in
       ((INT4, "INT4"), (UINT4, "UINT4"), (INT8, "INT8"), (FP8, "FLOAT8E4M3FN"), (W8A8, "INT8"), (FP8_TOKEN, "FLOAT8E4M3FN"))},
    **{("openvino", None, text): f"1 weight f32, 42 weight {kind}" for text, kind in ((INT4, "i4"), (INT8, "i8"), (FP8, "f8e4m3"))},
    ("openvino", None, UINT4): "1 weight f32, 42 weight u4, 42 zero_point u4",
}  # fmt: skip
PLAIN, PACKED = "14 weight F32", "42 weight_packed I32, 42 weight_scale F32, 42 weight_shape I64"
MLX, WORDS = f"42 biases F32, 42 scales F32, {PLAIN}, 42 weight U32", f"42 qweight I32, 42 qzeros I32, 42 scales F16, {PLAIN}"
TENSORS = {
    **{("compressed-tensors", None, text): f"{PLAIN}, {PACKED}" for text in (INT4, INT8)},
    ("compressed-tensors", None, UINT4): f"{PLAIN}, {PACKED}, 42 weight_zero_point I32",
    ("compressed-tensors", None, W8A8): f"{PLAIN}, 42 weight I8, 42 weight_scale F32",
    **{("compressed-tensors", None, text): f"{PLAIN}, 42 weight F8_E4M3, 42 weight_scale F32" for text in (FP8, FP8_TOKEN, FP8_TENSOR, FP8_BLOCK)},
    ("compressed-tensors", None, "nvfp4"): f"{PLAIN}, 42 weight_global_scale F32, 42 weight_packed U8, 42 weight_scale F8_E4M3",
    ("compressed-tensors", None, "mxfp4"): f"{PLAIN}, 42 weight_packed U8, 42 weight_scale U8",
    ("bitsandbytes", None, NF4): f"42 absmax U8, 42 bitsandbytes__nf4 U8, 42 nested_absmax F32, 42 nested_quant_map F32, 42 quant_map F32, {PLAIN}, 42 weight U8",
    **{("mlx", None, text): MLX for text in (INT4, UINT4, INT8)},
    **{("gptq", None, text): f"42 g_idx I32, {WORDS}" for text in (INT4, UINT4, INT8)},
    **{("awq", None, text): WORDS for text in (INT4, UINT4)},
}


@pytest.fixture(scope="module")
def saved() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/exports-stories15M.json").read_text())["rows"]
    return rows


def case_of(row: dict[str, Any]) -> tuple[str, str | None, str, str]:
    return row["format"], row["type"], row["scheme"], row["engine"]


def of(rows: list[dict[str, Any]], case: tuple[str, str | None, str, str]) -> list[dict[str, Any]]:
    return [r for r in rows if case_of(r) == case and r["executed"]]


def test_the_saved_table_has_every_engine_and_nothing_that_failed(saved: list[dict[str, Any]]) -> None:
    assert [r for r in saved if r["failed"] or r["weights_equal"] is False] == []
    assert [case for case in [*EXACT, *ROUNDING] if not of(saved, case)] == []
    assert {case_of(r) for r in saved if r["executed"]} == {*EXACT, *ROUNDING}
    assert all(r["kl_mean"] < 1e-3 for case in EXACT for r in of(saved, case))


def test_operators_and_types_are_those_meant(saved: list[dict[str, Any]]) -> None:
    """Of every file: what is quantized is, in the type that was asked for, and embedding, head and norms are as the model stores them."""
    assert {case_of(r)[:3]: r["note"].rpartition("; ")[2] for r in saved if r["engine"] in READERS} == OPERATORS
    assert {case_of(r)[:3]: r["tensors"] for r in saved if r["tensors"] is not None} == TENSORS


def test_what_is_far_in_the_saved_table_is_near_where_nothing_is_rounded(saved: list[dict[str, Any]]) -> None:
    """llama.cpp and vLLM over the same weights, dequantized; ONNX Runtime at level 1, and over the same weights where no activations are rounded; transformers beside itself with
    our rounding."""
    twins = [r for r in saved if "dequantized twin" in str(r["note"])]
    assert {case_of(r) for r in twins} == {*GGUF, *VLLM}
    unrounded = [r for _, kind, text, engine in [*LEVEL4, *ACTIVATIONS] for r in of(saved, ("onnx", kind.removesuffix("-level4"), text.partition("+")[0], engine))]
    assert len(unrounded) == len(LEVEL4) + len(ACTIVATIONS)
    same_rounding = [r for case in TRANSFORMERS for r in of(saved, case) if r["note"].startswith("against transformers;")]
    assert len(same_rounding) == len(TRANSFORMERS)
    assert all(r["kl_mean"] < 1e-6 for r in [*twins, *unrounded])
    assert all(r["kl_mean"] < (1e-6 if case_of(r)[2] != FP8_BLOCK else 1e-4) for r in same_rounding)


def test_linears_that_round_activations_are_ours_one_by_one(saved: list[dict[str, Any]]) -> None:
    """What is left between two exact programs is codes that flip: each linear by itself gives what ours gives."""
    for case in [*VLLM, *ACTIVATIONS[::2]]:
        told = [r["note"] for r in of(saved, case) if "dequantized twin" not in r["note"]]
        off = [float(re.findall(r"its \d+ linears.* are at most (\S+) of", note)[0]) for note in told]
        assert len(off) == 2
        assert max(off) < 1e-5
