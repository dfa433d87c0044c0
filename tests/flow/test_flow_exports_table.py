"""Rows of docs/exports.md measured anew on the demo model, a real one: equal weights, and distributions within the bounds of `benchmarks/exports.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ENGINES = {("gguf", "q4_0"): {"gguf package", "llama.cpp"}, ("onnx", "qdq"): {"onnxruntime, operator by operator", "onnxruntime", "onnxruntime-genai"}}


@pytest.mark.timeout(1800)
def test_rows_hold_on_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    benchmark = importlib.import_module("exports")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark, "ROWS", [("gguf", "q4_0", "int4-g32-sym"), ("onnx", "qdq", "int4-g32-asym")])
    text = ROOT / "calibration_data/evaluation.jsonl"
    monkeypatch.setattr(sys, "argv", ["exports.py", "--model", "demo", "--text", str(text), "--out", str(tmp_path / "out"), "--positions", "4", "--save", "demo"])
    assert benchmark.main() == 0
    rows = json.loads((tmp_path / "exports-demo.json").read_text())["rows"]
    for file, engines in ENGINES.items():
        found = [r for r in rows if (r["format"], r["type"]) == file]
        assert {r["engine"] for r in found} >= engines, found
        assert all(r["weights_equal"] in (True, None) for r in found), found
        assert min(r["kl_mean"] for r in found if r["executed"]) < 1e-6, found
