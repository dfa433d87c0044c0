"""What tests of whole runs share: a recipe beside a tiny model, its texts, and a run that dies."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qforge
from qforge.stages import artifact as artifacts

WORDS = [
    "the", "mill", "river", "wheat", "village", "model", "small", "function", "nearly", "same", "storm", "window", "lamp", "story", "morning", "day", "week", "grinds", "for",
    "every", "other", "until", "told",
]  # fmt: skip


def prose(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ",", "."]) for _ in range(words))


def write_recipe(folder: Path, **changes: object) -> Path:
    """A recipe file beside a tiny model, as JSON (which is YAML)."""
    (folder / "calibration.txt").write_text(prose(1, 2500))
    (folder / "evaluation.txt").write_text(prose(2, 1500))
    recipe: dict[str, object] = {
        "version": 1,
        "model": {"source": "model"},
        "calibration": {"source": "calibration.txt", "samples": 8, "sequence_length": 64},
        "quantize": {"method": "gptq", "scheme": "int4-g32-sym"},
        "export": [{"format": "gguf"}, {"format": "gptq"}],
        "evaluate": {"text": "evaluation.txt", "window": 64},
        "run": {"threads": 1},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({k: v for k, v in recipe.items() if v != "default"}))
    return path


def logits(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[1]]))
        return torch.cat([model(input_ids=torch.tensor([w])).logits[0, :-1] for w in windows])


def with_outliers(folder: Path, factor: float = 30.0) -> None:
    """Give two channels of every norm's output large values that the linears behind it undo: the same model, hard to round."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[[5, 40]] *= factor
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, [5, 40]] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def kill_at(block: int, path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies when a block is to be kept."""
    store = artifacts.BlockPieces.store

    def dying(self: artifacts.BlockPieces) -> object:
        whole = store(self)
        saved = whole.save

        def save(index: int, piece: object) -> None:
            if index == block:
                raise KeyboardInterrupt
            saved(index, piece)  # type: ignore[arg-type]

        object.__setattr__(whole, "save", save)
        return whole

    with monkeypatch.context() as patch:
        patch.setattr(artifacts.BlockPieces, "store", dying)
        with pytest.raises(KeyboardInterrupt):
            qforge.quantize(path, out=out)
