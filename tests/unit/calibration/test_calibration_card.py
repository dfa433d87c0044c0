"""Quantization on a card, as far as it can be proved without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.methods import Options, native
from qforge.methods.device import check_runs_there, computing_on, device_of, name_of

ROOT = Path(__file__).resolve().parents[3]


def test_a_pretended_card_gives_what_the_processor_gives() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/calibration/card_pretended.py"]
    paths = os.pathsep.join([str(ROOT / "tests/unit/calibration"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 8


def test_a_card_is_found_by_its_number_or_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a card called {device}")
    assert [device_of(asked) for asked in ("auto", "cpu", "cuda", "cuda:1")] == [torch.device(d) for d in ("cpu", "cpu", "cuda:0", "cuda:1")]
    assert name_of(device_of("cuda:1")) == "a card called cuda:1"
    with pytest.raises(MissingCapabilityError, match=r"run.device: cuda:2, but this machine has 2 CUDA devices"):
        device_of("cuda:2")
    assert name_of(torch.device("cpu")) is None


def test_what_has_no_loop_for_a_card_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"options.fisher .*processors; use run.device: cpu"):
        check_runs_there(torch.device("cuda", 0), Options(fisher=True))
    check_runs_there(torch.device("cuda", 0), Options())
    check_runs_there(torch.device("cpu"), Options(fisher=True))


def test_compiled_loops_are_not_given_a_cards_tensors() -> None:
    here = native.module()
    assert here is not None
    with computing_on(torch.device("meta")):  # a device that is not the processor
        assert native.module() is None
        assert not native.has_bf16_products()
    assert native.module() is here
