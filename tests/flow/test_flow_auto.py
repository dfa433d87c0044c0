"""`method: auto` from recipe to report: budgets kept, choices by hand kept, measured once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from flows import write_recipe

import qforge
from qforge import pipeline
from qforge.errors import RecipeError
from qforge.types import Results

DOWN = "model.layers.1.mlp.down_proj"


def run(folder: Path, budget: str, **quantize: object) -> Results:
    path = write_recipe(folder, quantize={"method": "auto", "budget": budget, **quantize}, export=[{"format": "gguf"}])
    return qforge.quantize(path, out=folder / "out")


def measurements(folder: Path) -> list[int]:
    return [p.stat().st_mtime_ns for p in (folder / "out" / "work").glob("sensitivity-*")]


def test_budgets_are_kept_and_measured_once(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    first = run(tmp_path, "4.5 bits")
    made = measurements(tmp_path)
    assert len(made) == 1
    auto = first.auto
    assert auto is not None
    assert first.artifact["bits_per_weight"] == pytest.approx(auto["bits_per_weight"])
    assert 4.2 < auto["bits_per_weight"] <= 4.5
    assert auto["measured_kl"] == first.evaluation.kl_mean  # type: ignore[union-attr]
    assert 0.4 < auto["measured_kl"] / auto["predicted_kl"] < 2
    assert auto["predicted_kl"] == pytest.approx(sum(u["predicted_kl"] for u in auto["units"]))
    schemes = {layer.name: layer.scheme for layer in first.layers}
    assert {n: u["scheme"] for u in auto["units"] for n in u["layers"]} == {n: s for n, s in schemes.items() if s is not None}
    assert len({schemes[f"model.layers.0.self_attn.{k}_proj"] for k in "qkv"}) == 1
    for uniform in auto["uniform"]:
        if uniform["bits_per_weight"] <= 4.5:
            assert auto["predicted_kl"] <= uniform["predicted_kl"]
    larger = run(tmp_path, "6 bits")
    assert larger.artifact["bits_per_weight"] > first.artifact["bits_per_weight"]
    assert larger.evaluation.kl_mean < first.evaluation.kl_mean  # type: ignore[union-attr]
    assert run(tmp_path, "0.25 MB").artifact["weights_bytes"] < 260_000
    assert measurements(tmp_path) == made
    again = run(tmp_path, "0.25 MB")
    assert again.work["computed"] == 0


def test_a_divergence_is_kept_in_two_tries(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    results = run(tmp_path, "kl <= 0.02")
    assert results.auto is not None
    assert results.evaluation is not None
    measured = results.evaluation.kl_mean or 0
    assert 0.01 < measured <= 0.022
    assert (measured > 0.02) == any("was asked for and" in w for w in results.warnings)
    assert results.auto["correction"] is not None
    assert {"open", "choose", "quantize", "evaluate"} <= set(results.timings) <= {"open", "texts", "choose", "quantize", "write", "evaluate", "tasks", "export", "verify"}
    assert run(tmp_path, "kl <= 0.02").work["computed"] == 0
    with pytest.raises(RecipeError, match=r"kl <= 1e-9: the best choice of these candidates is predicted to reach"):
        run(tmp_path, "kl <= 1e-9")


def test_what_is_measured_otherwise_has_a_correction_of_its_own(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    write_recipe(tmp_path)
    alone, after = [], []
    for out, found in ((tmp_path / "alone", alone), (tmp_path / "out", after)):
        for activations in ("fp", "int8") if out.name == "out" else ("int8",):
            recipe = write_recipe(tmp_path, quantize={"method": "auto", "budget": "kl <= 0.02"}, export=[], run={"threads": 1, "activations": activations})
            results = qforge.quantize(recipe, out=out)
            assert results.auto is not None
        found.append((results.auto["correction"], [layer.scheme for layer in results.layers]))
    assert alone == after


def test_choices_by_hand_win_and_the_report_explains(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    overrides = [{"match": DOWN, "scheme": "int8-g32-sym"}]
    results = run(tmp_path, "5 bits", ignore=["lm_head", "*.0.*"], overrides=overrides, candidates=["int3-g32-sym", "int4-g32-sym", "int8-channel-sym"])
    schemes = {layer.name: layer.scheme for layer in results.layers}
    assert schemes[DOWN] == "int8-g32-sym"
    assert schemes["model.layers.0.mlp.up_proj"] is None
    assert results.artifact["bits_per_weight"] <= 5
    assert set(schemes.values()) <= {"int3-g32-sym", "int4-g32-sym", "int8-channel-sym", "int8-g32-sym", None}
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text()
        for said in ("Choice of schemes", "THIS MODEL", "int4-g32-sym everywhere", "predicted KL divergence", "next smaller", "Budget: 5 bits"):
            assert said in text, (name, said)


def test_a_dry_run_says_what_it_knows(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    path = write_recipe(tmp_path, quantize={"method": "auto", "budget": "4.5 bits"})
    _, before, estimate = pipeline.plan(path, out=tmp_path / "out")
    assert "once it has measured" in before.notes[-1]
    assert before.bits_per_weight <= 4.5
    assert estimate.seconds["choose"] > 0
    assert not (tmp_path / "out").exists()
    results = qforge.quantize(path, out=tmp_path / "out")
    _, after, _ = pipeline.plan(path, out=tmp_path / "out")
    assert "chosen from an earlier measurement" in after.notes[-1]
    assert after.bits_per_weight == results.artifact["bits_per_weight"]
    assert {n: str(s) for n, s in after.schemes.items()} == {layer.name: layer.scheme for layer in results.layers if layer.scheme}
    assert any("no candidate: export gptq" in n for n in results.warnings)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["auto"]["curve"]
