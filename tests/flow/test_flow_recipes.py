"""The shipped recipes, run as they are on the demo model (fetched through pip), and the honesty of the demo's gates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
THREADS = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def run(recipe: str, out: Path, *options: str, file: str = "results.json") -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "qforge", "quantize", "--recipe", str(ROOT / "recipes" / recipe), "--out", str(out), "--set", f"run.threads={THREADS}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (out / file).exists(), done.stderr
    results: dict[str, Any] = json.loads((out / file).read_text())
    print(done.stdout)
    return done.returncode, results


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_demo_passes_its_gates_and_plain_rounding_does_not(tmp_path: Path) -> None:
    code, gptq = run("demo.yaml", tmp_path / "demo")
    assert code == 0
    assert all(g["passed"] for g in gptq["gates"])
    assert all(e["lossless"] for e in gptq["exports"])
    llama = [v for e in gptq["exports"] for v in e["verified_by"] if v["engine"] == "llama.cpp"]
    assert llama[0]["positions"] >= 64
    assert llama[0]["kl_mean"] < 0.02
    again, second = run("demo.yaml", tmp_path / "demo")
    assert again == 0
    assert second["work"]["computed"] == 0
    code, rtn = run("demo.yaml", tmp_path / "rtn", "--set", "quantize.method=rtn", "--set", "export=[]", "--set", f"evaluate.text={third(tmp_path)}")
    assert code == 1
    assert not any(g["passed"] for g in rtn["gates"] if g["name"] != "size_ratio")
    assert gptq["evaluation"]["kl_mean"] < 0.6 * rtn["evaluation"]["kl_mean"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "recipes").glob("*.yaml") if p.name not in ("demo.yaml", "sweep.yaml")))
def test_every_other_shipped_recipe_passes(recipe: str, tmp_path: Path) -> None:
    code, results = run(recipe, tmp_path / "out", "--set", f"evaluate.text={third(tmp_path)}")
    assert code == 0
    assert results["gates"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_sweep_passes(tmp_path: Path) -> None:
    """Few calibration samples: what is tried is the recipe, not how good GPTQ gets."""
    code, sweep = run("sweep.yaml", tmp_path / "out", "--set", f"evaluate.text={third(tmp_path)}", "--set", "calibration.samples=4", file="sweep.json")
    assert code == 0
    assert len(sweep["variants"]) == 6
    assert all(v["error"] is None and v["passed"] for v in sweep["variants"])
    assert {v["name"] for v in sweep["variants"] if v["front"]} >= {"gptq-int4-g64-sym"}


def third(folder: Path) -> Path:
    """A third of the text that the recipes name: the whole one takes minutes a recipe."""
    text = folder / "text.jsonl"
    text.write_text("".join((ROOT / "calibration_data" / "evaluation.jsonl").read_text().splitlines(keepends=True)[::3]))
    return text
