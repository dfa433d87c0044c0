"""A run under a memory limit holds what its estimate says: the calibration text's activations lie in a file, wherever the model's code has left them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from flows import kill_at, write_recipe

from qforge import pipeline
from qforge.stages import meter
from qforge.stages.estimates import ACTIVATIONS, PROCESS

MIB = 1 << 20
SAMPLES, LENGTH, HIDDEN, INTERMEDIATE = 96, 256, 256, 1024
BUDGET = 8 * MIB  # for activations


def run(folder: Path, limit: int) -> dict[str, Any]:
    """Quantize in a process of its own; its results.json."""
    command = [sys.executable, "-m", "qforge", "quantize", "--recipe", str(folder / "recipe.yaml"), "--out", str(folder / "out"), "--fresh", "--set", f"run.memory_limit={limit}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return dict(json.loads((folder / "out" / "results.json").read_text()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make(tmp_path / "model", layers=2, hidden=HIDDEN, intermediate=INTERMEDIATE, tied=False, dtype=torch.bfloat16)
    (tmp_path / "text.txt").write_text(" ".join(tiny.TEXT) * 400)
    recipe = {
        "version": 1,
        "model": {"source": "model"},
        "calibration": {"source": "text.txt", "samples": SAMPLES, "sequence_length": LENGTH},
        "quantize": {"method": "gptq", "scheme": "int4-g64-sym"},
        "evaluate": None,
        "run": {"threads": 1},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return tmp_path


def test_what_waits_lies_in_a_file_and_the_peak_is_as_estimated(folder: Path) -> None:
    _, _, predicted = pipeline.plan(folder / "recipe.yaml")
    fixed = sum(size for name, size in predicted.peak_bytes.items() if name != ACTIVATIONS)
    small = run(folder, fixed + BUDGET)
    large = run(folder, fixed + 2048 * MIB)
    assert small["artifact"]["sha256"] == large["artifact"]["sha256"]
    above_start = {name: r["memory"]["peak during quantize"] - r["memory"]["peak during texts"] for name, r in (("small", small), ("large", large))}
    # of every token: both streams, the unquantized block's inputs in half precision, and at the widest linear its input and the residual
    waiting = SAMPLES * LENGTH * (2 * 4 * HIDDEN + 2 * (3 * HIDDEN + INTERMEDIATE) + 4 * (HIDDEN + INTERMEDIATE))
    assert above_start["large"] > 0.7 * waiting
    assert above_start["small"] < above_start["large"] - 0.5 * waiting
    assert above_start["small"] < fixed - PROCESS + BUDGET + 32 * MIB
    assert small["memory"]["peak during quantize"] == pytest.approx(fixed + BUDGET, rel=0.15)


def test_the_parts_of_quantizing_sum_to_its_time(folder: Path) -> None:
    results = pipeline.quantize(folder / "recipe.yaml", out=folder / "out", overrides=["calibration.samples=8"])
    parts = results.parts["quantize"]
    assert {"load", "forward", "statistics", "solve", "refine", "write"} <= parts.keys()
    assert all(seconds > 0 for seconds in parts.values())
    assert 0.9 * results.timings["quantize"] < sum(parts.values()) <= results.timings["quantize"]
    assert "of which refine" in (folder / "out" / "report.md").read_text()
    again = pipeline.quantize(folder / "recipe.yaml", out=folder / "out", overrides=["calibration.samples=8"])
    assert again.parts == results.parts  # of the run that did the work


GB = 10**9
LIMIT = {"peak_rss_bytes": "<= 8e9"}


def takes(gigabytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on processes are as large as that."""
    monkeypatch.setattr(meter, "_status", lambda field: gigabytes * GB)


def test_the_peak_of_a_run_that_was_killed_counts_when_it_is_resumed_and_not_for_another_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    same: dict[str, Any] = {"export": [], "evaluate": None, "gates": LIMIT}
    takes(14, monkeypatch)
    kill_at(1, write_recipe(tmp_path, **same), tmp_path / "out", monkeypatch)
    takes(5, monkeypatch)
    resumed = pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out")
    assert (resumed.passed, resumed.peak_rss_bytes, resumed.memory["peak during quantize"], resumed.memory["peak during write"]) == (False, 14 * GB, 14 * GB, 5 * GB)
    other = pipeline.quantize(write_recipe(tmp_path, **same, quantize={"method": "rtn", "scheme": "int8-g32-sym"}), out=tmp_path / "out")
    assert (other.passed, other.peak_rss_bytes) == (True, 5 * GB)
    back = pipeline.quantize(write_recipe(tmp_path, **same), out=tmp_path / "out")
    assert (back.passed, back.timings["quantize"], back.artifact["sha256"]) == (False, resumed.timings["quantize"], resumed.artifact["sha256"])
    fresh = pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out", fresh=True)
    assert (fresh.passed, fresh.artifact["sha256"]) == (True, resumed.artifact["sha256"])


def test_another_export_or_an_artifact_that_is_written_again_leaves_the_peak_of_quantizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    same: dict[str, Any] = {"evaluate": None, "gates": LIMIT}
    takes(14, monkeypatch)
    first = pipeline.quantize(write_recipe(tmp_path, **same, export=[]), out=tmp_path / "out")
    takes(5, monkeypatch)
    recipe = write_recipe(tmp_path, **same, export=[{"format": "gptq"}])
    for taken_away in (None, "model", "exports", None):
        if taken_away is not None:
            shutil.rmtree(tmp_path / "out" / taken_away)
        again = pipeline.quantize(recipe, out=tmp_path / "out")
        assert (again.passed, again.peak_rss_bytes) == (False, 14 * GB), taken_away
        assert (again.timings["quantize"], again.parts) == (first.timings["quantize"], first.parts), taken_away
    assert again.work["computed"] == 0


def test_what_is_not_part_of_a_run_any_more_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    evaluated = pipeline.quantize(write_recipe(tmp_path, export=[]), out=tmp_path / "out")
    alone = pipeline.quantize(write_recipe(tmp_path, export=[], evaluate=None), out=tmp_path / "out")
    assert evaluated.timings.keys() - alone.timings.keys() == {"evaluate"}
    assert "peak during evaluate" not in alone.memory
    again = pipeline.quantize(write_recipe(tmp_path, export=[]), out=tmp_path / "out")
    assert (again.timings["evaluate"], again.memory["peak during evaluate"]) == (evaluated.timings["evaluate"], evaluated.memory["peak during evaluate"])
