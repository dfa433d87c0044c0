"""benchmarks/vs_eight_bits.py: a checkpoint is run with its rounding of activations; one that rounds none is refused; the best of each tool are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny
import torch
from flows import write_recipe

import qforge
from qforge.engines.base import Scorer
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.models.model import open_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import vs_eight_bits
from peers.runs import OURS, Run

WINDOWS = torch.randint(3, 380, (2, 150), generator=torch.Generator().manual_seed(0)).tolist()


def logits(engine: Scorer) -> torch.Tensor:
    """All of them, in one tensor."""
    return torch.cat(list(engine.score(WINDOWS)))


@pytest.mark.parametrize("scheme", ["w8a8-int8", "fp8-dynamic"])
def test_a_checkpoint_is_executed_as_its_scheme_says(tmp_path: Path, scheme: str) -> None:
    tiny.make(tmp_path / "model", layers=2)
    qforge.quantize(write_recipe(tmp_path, quantize={"method": "rtn", "scheme": scheme}, export=[], evaluate=None), out=tmp_path / "run")
    checkpoint = vs_eight_bits.Checkpoint(tmp_path / "run/model")
    executed = logits(checkpoint)
    reference = logits(TransformersEngine(open_model(str(tmp_path / "run"))))
    torch.testing.assert_close(executed, reference, rtol=1e-4, atol=1e-4)

    for module in checkpoint._model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None
    cost = (logits(checkpoint) - reference).norm()
    assert cost > 10 * (executed - reference).norm()

    ours = vs_eight_bits.candidate(Run(OURS, "rtn", scheme, 8, 0), tmp_path)
    assert isinstance(ours, RuntimeEngine)
    assert (logits(ours) - reference).norm() < cost / 2  # codes on the edge flip


def test_a_checkpoint_that_rounds_no_activations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no linear rounds its activations"):
        vs_eight_bits.Checkpoint(tiny.make(tmp_path / "model", layers=1))


def test_the_best_of_each_tool_are_compared_scheme_by_scheme() -> None:
    found = [("ours", "rtn", 0.004, 1.0), ("ours", "gptq", 0.002, 6.0), ("llmcompressor", "rtn", 0.008, 2.0), ("llmcompressor", "gptq", 0.004, 12.0)]
    rows = [{"tool": t, "method": m, "name": f"{t}:{m}", "scheme": scheme, "kl": kl, "seconds": s} for scheme in vs_eight_bits.RUNS for t, m, kl, s in found]
    assert vs_eight_bits.ratio_table(rows).splitlines()[2:] == [f"| {scheme} | ours:gptq | llmcompressor:gptq | 0.50 | 0.50 |" for scheme in vs_eight_bits.RUNS]
    assert vs_eight_bits.ratio_table(rows[:2]) == ""
