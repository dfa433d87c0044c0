"""Quantization on a card that is not there (`fake_card`). Run by test_calibration_card.py in a process of its own, because torch then knows a device more."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_card
import pytest
import tiny
import torch
from calibrated import Memory, schemes_of, windows

from qforge import numerics, pipeline
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.errors import MissingCapabilityError
from qforge.methods import Options, awq, find, scales
from qforge.methods.device import computing_on
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.stages import artifact

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import gpu_quantize

SMALL = gpu_quantize.Shape(hidden=32, intermediate=64, layers=1, heads=2, vocabulary=64, windows=6, length=40, steps=10)


@contextlib.contextmanager
def card() -> Iterator[None]:
    with fake_card.Card(), computing_on(fake_card.DEVICE):
        yield


def test_weights_are_rounded_bit_for_bit_as_on_the_processor() -> None:
    found = list(gpu_quantize.roundings(card, gpu_quantize.Shape(hidden=128, intermediate=256, vocabulary=40)))
    assert [row["scheme"] for row in found if not row["right"]] == []
    assert {row["scheme"] for row in found} == set(gpu_quantize.ROUNDED)


def test_a_division_as_a_gpu_does_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "divided", lambda x, by: x / by)
    assert [row["scheme"] for row in gpu_quantize.roundings(card, SMALL) if not row["right"]] != []


def test_methods_with_calibration_lose_as_much_as_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awq, "RATIOS", 4)  # operations on the pretended card are slow
    monkeypatch.setattr(scales, "GRID", scales.GRID[:3])
    found = list(gpu_quantize.methods(card, SMALL))
    assert [row["what"] for row in found] == [method for method, _ in gpu_quantize.CALIBRATED]
    assert [row for row in found if not row["right"]] == []
    assert all(row["kl_here"] > 0 and abs(row["kl_there"] / row["kl_here"] - 1) < 0.1 for row in found)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_blocks_of_other_families_run_there_spilled_and_taken_up_again(family: str, tmp_path: Path) -> None:
    """Killed after the first block, with its hidden states kept, and after the second, replayed; a linear left on the processor would raise."""
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in family else {}
    folder = tiny.make(tmp_path / "m", family, layers=2, hidden=32, intermediate=64, heads=2, kv_heads=1, tied=False, **more)  # type: ignore[arg-type]

    def run(memory: Memory) -> dict[str, QuantizedLinear]:
        blocks, quantizer = BlockModel(open_model(str(folder))), find("gptq")
        assert quantizer is not None
        job = Job(blocks, quantizer, schemes_of(blocks, "int8-channel-sym+int8-tensor-static", head=True), Options(refine=0, scale_search=False), Room(tmp_path, 1 << 14))
        with card():
            quantize_blocks(job, windows(3, 20), memory.store(), SILENT)
        return memory.linears()

    whole = run(Memory())
    assert {t.device.type for q in whole.values() for t in (q.codes, q.scales, q.input_scale) if t is not None} == {"cpu"}
    for finished, keeps in ((1, True), (2, False)):
        memory = Memory(die_after=finished)
        with pytest.raises(KeyboardInterrupt):
            run(memory)
        memory.die_after, memory.hidden = None, memory.hidden if keeps else {}
        resumed = run(memory)
        assert all(resumed[n].equals(q) for n, q in whole.items())


@pytest.mark.parametrize(("method", "same"), [("rtn", True), ("gptq", False)])
def test_a_run_writes_the_same_artifact_and_does_not_take_the_other_places_pieces(method: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From recipe to artifact; blocks that the processor has finished are not taken for a card's, whose last bits may differ."""
    tiny.make(tmp_path / "model", layers=2, hidden=32, intermediate=64, heads=2, kv_heads=1)
    calibration = {"source": "builtin", "samples": 2, "sequence_length": 32}
    quantize = {"method": method, "scheme": "int4-g32-sym", "options": {"refine": 0}}
    recipe = {"version": 1, "model": {"source": "model"}, "calibration": calibration, "quantize": quantize, "evaluate": None}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    here = pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out")
    opened: list[str] = []

    @contextlib.contextmanager
    def on_card(device: torch.device) -> Iterator[None]:
        opened.append(device.type)
        with card():
            yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(artifact, "computing_on", on_card)
    there = pipeline.quantize(tmp_path / "recipe.yaml", overrides=["run.device=cuda"], out=tmp_path / "out")
    assert opened == ["cuda"]
    assert there.work["computed"] >= 2
    assert (there.artifact["sha256"] == here.artifact["sha256"]) or not same
    assert [layer.scheme for layer in there.layers] == [layer.scheme for layer in here.layers]


def test_too_little_memory_is_said() -> None:
    with pytest.raises(MissingCapabilityError, match=r"do not fit into the memory of card:0; use fewer calibration.samples.*\(tried to allocate 3 GiB\)"), card():
        raise torch.OutOfMemoryError("tried to allocate 3 GiB\nand more")
