"""What rounding of activations costs a real model: perplexity on the runtime against transformers' fp32 over the same integers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tolerances import PERPLEXITY, PERPLEXITY_8_BITS

from qforge import pipeline
from qforge.recipe import load_recipe


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheme", ["int4-g64-sym", "int4-g32-asym", "int8-channel-sym"])
def test_perplexity_with_rounded_activations_stays_within_tolerance(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"version: 1\nmodel: {{source: demo}}\nquantize: {{method: rtn, scheme: {scheme}}}\nevaluate: null\n")
    pipeline.quantize(load_recipe(path), out=tmp_path / "out")
    text = tmp_path / "text.txt"
    documents = (Path(__file__).parents[2] / "calibration_data" / "evaluation.jsonl").read_text().splitlines()
    text.write_text(" ".join(json.loads(line)["text"] for line in documents)[:20_000])
    model = tmp_path / "out" / "model"
    exact = pipeline.evaluate(model, text=str(text), window=256, engine="transformers").candidate
    for activations, most in (PERPLEXITY_8_BITS if scheme.startswith("int8") else PERPLEXITY).items():
        rounded = pipeline.evaluate(model, text=str(text), window=256, activations=activations).candidate
        assert abs(rounded["perplexity"] / exact["perplexity"] - 1) <= most
