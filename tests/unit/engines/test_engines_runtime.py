"""The built-in runtime as a Scorer, and the pieces that windows are scored in."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from qforge.engines.base import Scorer, chunks
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.models.model import open_model
from qforge.runtime.decoder import supports


@pytest.mark.parametrize(
    ("length", "wanted"), [(0, []), (1, []), (2, [(0, 1)]), (129, [(0, 128)]), (130, [(0, 128), (128, 129)]), (512, [(0, 128), (128, 256), (256, 384), (384, 511)])]
)
def test_chunks_cover_all_positions_but_the_last(length: int, wanted: list[tuple[int, int]]) -> None:
    assert chunks(length) == wanted


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m")
    engine: Scorer = RuntimeEngine(open_model(str(folder)))
    windows = [[5 + i % 300 for i in range(150)], [9, 10], [7] * 20]
    pieces = list(engine.score(windows))
    assert [len(p) for p in pieces] == [128, 21, 1, 19]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([w])).logits[0, :-1] for w in windows])
    assert (torch.cat(pieces) - wanted).abs().max() < 1e-4


def test_whether_the_runtime_runs_a_model_is_known_without_weights(tmp_path: Path) -> None:
    assert supports(open_model(str(tiny.make(tmp_path / "a"))).spec) is None
    assert "does not list" in str(supports(open_model(str(tiny.make(tmp_path / "b", "stablelm"))).spec))
