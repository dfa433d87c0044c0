"""Saved tables of benchmarks: each states its day and one round as one; what all of them share; the cost of activations over windows."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from qforge.runtime import LLM

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = sorted(path for name in ("vs_llama_cpp", "vs_openvino", "vs_vllm", "startup", "prompt_lookup", "activations") for path in RESULTS.glob(f"{name}-*.json"))


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module(name)


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_a_saved_table_states_its_day_and_what_its_rounds_are(path: Path) -> None:
    content, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    day = content["environment"]["date"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", day)
    assert f"{day}, {content['environment']['cpu']}, {content['environment']['instruction_set']}" in text
    assert f"qforge {content['environment']['qforge']}" in text
    assert "of 1 rounds" not in text
    one = len(content.get("rounds", [0, 0])) == 1
    assert ("One round" in text) == one
    assert not one or not re.search(r"\(([\d.]+)-\1\)", text)
    assert "/" not in content["command"].replace("benchmarks/", "")


@pytest.mark.parametrize(("name", "has_it"), [("llama-1.1b-zen4", True), ("llama-1.1b-xeon", False)])
def test_decoding_beside_llama_cpp_is_told_with_what_memory_gave(name: str, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results from before it was measured have no such line."""
    file = RESULTS / f"vs_llama_cpp-{name}.json"
    content = json.loads(file.read_text())
    text = _module(monkeypatch, "vs_llama_cpp").page(content)
    assert text + "\n" == file.with_suffix(".md").read_text()
    told = re.findall(r"([\d.]+) \((\d+), (\d+), (\d+)\)", text)
    assert len(told) == (len(content["rounds"]) if has_it else 0)
    for (ratio, *memory), r in zip(told, content["rounds"], strict=False):
        assert float(ratio) == round(r["ours"]["decode"] / r["llama.cpp"]["decode"], 2)
        assert [int(m) for m in memory] == [round(b / 1e9) for b in r["memory"]["read_bandwidths"]]


def test_the_table_of_starts_names_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((RESULTS / "startup-smollm2-xeon.json").read_text())
    text = _module(monkeypatch, "startup").page(content)
    assert text + "\n" == (RESULTS / "startup-smollm2-xeon.md").read_text()
    assert f"xllamacpp {content['environment']['xllamacpp']}" in text


def test_several_rounds_have_a_spread_and_one_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _module(monkeypatch, "saved")
    assert (saved.spread([2.0, 1.0, 4.0]), saved.rounds_said(3)) == ("2.00 (1.00-4.00)", "Medians of 3 rounds")
    assert (saved.spread([2.634]), saved.rounds_said(1)) == ("2.63", "One round")


def test_a_saved_command_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _module(monkeypatch, "saved")
    monkeypatch.delenv("QFORGE_ISA", raising=False)
    monkeypatch.setattr(sys, "argv", ["x.py", "/some/where/model", "--text", "/some/wiki.test.raw", "--text=/some/wiki.test.raw", "--rounds", "3"])
    assert saved.told("x") == "python benchmarks/x.py model --text wiki.test.raw --text=wiki.test.raw --rounds 3"


def test_rounding_activations_is_told_with_intervals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    activations = _module(monkeypatch, "activations")
    folder = tiny.make(tmp_path / "model")
    exact = LLM(str(folder), activations="fp", kv_cache="fp32", max_num_seqs=1)
    windows = activations.cut(exact, " ".join(tiny.TEXT) * 20, 32, 8)
    assert (len(windows.ids), windows.tokens) == (8, 8 * 31)
    same, rounded = (activations.row(str(folder), exact, windows, "fp", kind) for kind in ("fp32", "int8"))
    assert (same["perplexity_ratio"], same["kl_mean"], same["top1_agreement"], same["logits_off"]) == (1.0, 0.0, 1.0, 0.0)
    low, high = rounded["perplexity_ratio_ci95"]
    assert low < rounded["perplexity_ratio"] < high
    assert 0 < rounded["kl_mean_ci95"][0] < rounded["kl_mean"] < rounded["kl_mean_ci95"][1]
    assert rounded["logits_off"] > 0
    assert re.fullmatch(r"\| fp \| int8 \| [+-]\S+ \(\S+ to \S+\) \| \S+ \(\S+ to \S+\) \| \S+ \(\S+ to \S+\) \| \S+ \|", activations.line(rounded))


def test_kernels_are_timed_on_weights_that_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel's copies are as many bytes as is read of memory, and each is the same weight."""
    kernels = _module(monkeypatch, "kernel_int4")
    asked, seen = [], []
    monkeypatch.setattr(kernels, "far_bytes", lambda least: asked.append(least) or 1 << 20)
    monkeypatch.setattr(kernels, "ROUNDS", 1)
    monkeypatch.setattr(kernels.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(kernels, "_copies", lambda weight, count, real=kernels._copies: seen.append((weight, real(weight, count))) or seen[-1][1])
    rows = kernels.measure(256, 1, None)
    assert asked == [128 << 20]
    assert all(r["cold_bytes"] >= 1 << 20 and r["read_bytes_per_second"] > 0 for r in rows)
    for weight, copies in seen:
        assert sum(c.nbytes for c in copies) >= 1 << 20
        for name in ("codes", "scales", "half_scales", "zeros", "code_sums", "pair_sums"):
            wanted = getattr(weight, name)
            assert all(getattr(c, name) is None if wanted is None else np.array_equal(getattr(c, name), wanted) for c in copies)
            assert wanted is None or len({getattr(c, name).ctypes.data for c in copies}) == len(copies)
