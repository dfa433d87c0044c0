"""A comparison that fails names the linear that was damaged, through the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file

import qforge
from qforge import pipeline
from qforge.cli.main import main


def run(baseline: Path, candidate: Path) -> int:
    with pytest.raises(SystemExit) as e:
        main(["compare", str(baseline), str(candidate)])
    return int(e.value.code or 0)


@pytest.mark.slow
def test_the_damaged_linear_is_named_by_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.make(tmp_path / "model")
    (tmp_path / "evaluation.txt").write_text(" ".join(f"{t} {i}" for i in range(30) for t in tiny.TEXT))
    recipe = {"version": 1, "model": {"source": "model"}, "quantize": {"method": "rtn", "scheme": "int8-g32-sym"}, "run": {"threads": 1}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"evaluate": {"text": "evaluation.txt", "window": 64}}))
    qforge.quantize(tmp_path / "recipe.yaml", out=tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = next((tmp_path / "b" / "model").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight_scale"].mul_(1.02)
    save_file(tensors, file, metadata={"format": "pt"})
    evaluation = pipeline.evaluate(tmp_path / "b" / "model", against=tmp_path / "model", text=str(tmp_path / "evaluation.txt"), window=64)
    results = json.loads((tmp_path / "b" / "results.json").read_text())
    results["evaluation"] = {**json.loads(json.dumps(asdict(evaluation))), "protocol": results["evaluation"]["protocol"], "text_sha256": results["evaluation"]["text_sha256"]}
    (tmp_path / "b" / "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert run(tmp_path / "a" / "results.json", tmp_path / "b" / "results.json") == 1
    out = capsys.readouterr().out
    assert "note: the artifacts' weights differ in 1 of 29 tensors: model.layers.2.mlp.up_proj (0.02 of its norm)\n" in out
    assert run(tmp_path / "a" / "results.json", tmp_path / "a" / "results.json") == 0
    assert "artifacts' weights" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "a" / "model")
    assert run(tmp_path / "a" / "results.json", tmp_path / "b" / "results.json") == 1
    assert "artifacts' weights" not in capsys.readouterr().out
