"""The demo's adapter and the script that trains it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny
import torch
from peft import LoraConfig
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ADAPTER = EXAMPLES / "demo-adapter"
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_shipped_adapter_moves_every_linear_of_the_demo_model() -> None:
    tensors = load_file(ADAPTER / "adapter_model.safetensors")
    modules = {name.rsplit(".lora_", 1)[0] for name in tensors}
    assert {m.rsplit(".", 1)[1] for m in modules} == LINEARS
    assert len(modules) == 30 * len(LINEARS)
    for module in modules:
        a, b = tensors[f"{module}.lora_A.weight"].float(), tensors[f"{module}.lora_B.weight"].float()
        assert torch.isfinite(b @ a).all()
        assert (b @ a).abs().max() > 0
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert (ADAPTER / "adapter_model.safetensors").stat().st_size < 1.9e6


def test_its_settings_name_the_base_and_no_path() -> None:
    settings = json.loads((ADAPTER / "adapter_config.json").read_text("utf-8"))
    assert settings["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert set(settings["target_modules"]) == LINEARS
    assert not any(isinstance(value, str) and value.startswith(("/", ".", "~")) for value in settings.values())


def test_every_record_teaches_the_three_lines() -> None:
    records = [json.loads(line)["messages"] for line in (EXAMPLES / "adapter_text.jsonl").read_text("utf-8").splitlines()]
    assert len({question["content"] for question, _ in records}) == len(records) == 144
    for _, answer in records:
        assert [line.split(": ", 1)[0] for line in answer["content"].split("\n")] == ["type", "area", "note"]


def test_the_training_script_learns_and_saves_what_peft_reads(tmp_path: Path) -> None:
    model, out = tiny.make(tmp_path / "model", layers=1), tmp_path / "adapter"
    command = [sys.executable, EXAMPLES / "train_adapter.py", "--model", model, "--out", out, "--epochs", "1", "--batch", "32", "--learning-rate", "0.01"]
    printed = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True, timeout=300).stdout
    losses = [float(line.rsplit(" ", 1)[1]) for line in printed.splitlines() if "held-out answers" in line]
    assert losses[1] < losses[0]
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert str(tmp_path) not in (out / "adapter_config.json").read_text("utf-8")
    assert LoraConfig.from_pretrained(str(out)).lora_alpha == 16
    assert len(load_file(out / "adapter_model.safetensors")) == 14
