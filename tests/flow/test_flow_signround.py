"""`method: signround` from recipe to report."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from flows import write_recipe

import qforge
from qforge import pipeline
from qforge.calibration import fisher
from qforge.stages import estimates
from qforge.types import Results


def run(folder: Path, method: str, **options: object) -> Results:
    path = write_recipe(folder, quantize={"method": method, "scheme": "int3-g32-sym", "options": options}, export=[{"format": "gptq"}])
    return qforge.quantize(path, out=folder / method)


@pytest.mark.parametrize("fisher", [False, True])
def test_a_run_gains_on_plain_rounding_and_is_found_again(tmp_path: Path, fisher: bool) -> None:
    tiny.make(tmp_path / "model", layers=2)
    plain, learned = run(tmp_path, "rtn"), run(tmp_path, "signround", steps=40, fisher=fisher)
    assert plain.evaluation is not None
    assert learned.evaluation is not None
    assert learned.evaluation.kl_mean is not None
    assert learned.evaluation.kl_mean < 0.8 * (plain.evaluation.kl_mean or 0)
    assert {layer.scheme for layer in learned.layers} == {layer.scheme for layer in plain.layers}
    assert all(layer.output_error is not None and layer.output_error < 1 for layer in learned.layers if layer.scheme)
    assert learned.parts["quantize"]["tune"] > 0
    assert run(tmp_path, "gptq", fisher=fisher).artifact["sha256"] != learned.artifact["sha256"]
    again = run(tmp_path, "signround", steps=40, fisher=fisher)
    assert again.work["computed"] == 0
    assert again.artifact["sha256"] == learned.artifact["sha256"]
    assert run(tmp_path, "signround", steps=41, fisher=fisher).work["computed"] > 0


def test_a_dry_run_counts_steps(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    found = []
    for method, options in (("gptq", {}), ("signround", {"steps": 100}), ("signround", {"steps": 1000})):
        path = write_recipe(tmp_path, quantize={"method": method, "scheme": "int4-g32-sym", "options": options})
        found.append(pipeline.plan(path, out=tmp_path / "out")[2])
    assert found[0].seconds["quantize"] < found[1].seconds["quantize"] < found[2].seconds["quantize"]


def test_a_dry_run_counts_the_tokens_that_gradients_of_outputs_take_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    path = write_recipe(tmp_path, quantize={"method": "gptq", "scheme": "int4-g32-sym", "options": {"fisher": True}})
    asked: list[int] = []
    real = estimates._gradient_memory
    monkeypatch.setattr(estimates, "_gradient_memory", lambda plan, blocks, batch: asked.append(batch) or real(plan, blocks, batch))
    monkeypatch.setattr(fisher, "BATCH_TOKENS", 24)
    pipeline.plan(path, out=tmp_path / "out")
    assert asked == [24]
