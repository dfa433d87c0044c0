"""The ceiling beside other engines' figures: multiplications counted one by one, the goal is the lesser one, and the rate is measured or not there."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qforge.ops.native_module import instruction_sets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ceiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("ceiling")


def test_counts_what_a_model_multiplies(ceiling: Any, tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=50)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    sizes = {name: m.weight.numel() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    count = 0
    for prompt, output in ((5, 1), (3, 4)):
        for position in range(prompt + output - 1):  # the last token is given out and goes nowhere
            count += sum(n for name, n in sizes.items() if name != "lm_head")
            count += 3 * sum(2 * 4 * 8 for _ in range(position + 1))  # each query with each key, each weight with each value
        count += output * sizes["lm_head"]
    assert ceiling.multiplications(tmp_path, [{"prompt": [0] * 5, "output": 1}, {"prompt": [0] * 3, "output": 4}]) == count


def test_says_the_lesser_goal(ceiling: Any) -> None:
    assert "Goal: 60, three quarters of the ceiling" in ceiling.said(8e9, 10**10, 100, 40.0)
    assert "Goal: 50, 2.5 times theirs" in ceiling.said(8e9, 10**10, 100, 20.0)
    assert ceiling.said(None, 10**10, 100, 20.0) == ""


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
def test_measures_the_rate(ceiling: Any) -> None:
    """What a core of 1 to 6 GHz can: 64 or 128 bytes a cycle by vectors of 512 bits, half as many or as many by those of 256, 1,024 by tiles; a disturbed one somewhat less."""
    assert ceiling.integer_rate(1, "portable") is None
    for name in (n for n in instruction_sets()[:-1] if n != "neon-dotprod"):  # integer_rate.cpp is written for x86
        rate = ceiling.integer_rate(1, name)
        assert rate is not None
        assert (2e11 if name == "amx" else 1.5e10) < rate < (7e12 if name == "amx" else 8e11)
