"""One judge for all: KL divergence, perplexity and agreement of a set of dequantized weights, in transformers' own code in fp32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.divergence import evaluate
from qforge.files import sha256_file
from qforge.models.model import Model
from qforge.models.weights import TensorInfo, WeightSource, digest
from qforge.text.windows import EvaluationWindows


class Replaced:
    """A model's weights, some of them replaced by those of a file (a head among them unties it)."""

    def __init__(self, source: WeightSource, path: Path) -> None:
        self._source = source
        self._path = path
        with safe_open(path, framework="pt") as file:
            self._found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # not a dictionary
        strange = [n for n, shape in self._found.items() if n != "lm_head.weight" and (n not in source.names() or source.info(n).shape != shape)]
        if strange:
            raise ValueError(f"{path}: the model has no such tensors: {', '.join(strange[:3])}")

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._source.names(), *self._found]))

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._found[name], torch.float32) if name in self._found else self._source.info(name)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._found:
            return self._source.read(name)
        with safe_open(self._path, framework="pt") as file:
            return file.get_tensor(name)

    def fingerprint(self) -> str:
        return digest("replaced", self._source.fingerprint(), sha256_file(self._path))


class Original(TransformersEngine):
    """The original, whose hidden states are computed once for all candidates."""

    _kept: list[torch.Tensor] | None = None

    def hidden(self, windows: list[list[int]], done: Callable[[int], None] = lambda block: None) -> list[torch.Tensor]:
        if self._kept is None:
            self._kept = super().hidden(windows, done)
        return self._kept


class Judge:
    """Judges folders that hold a weights.safetensors; a verdict is kept beside the weights and found again."""

    def __init__(self, model: Model, windows: EvaluationWindows) -> None:
        self._model = model
        self._windows = windows
        self._original = Original(model)
        self._text = hashlib.sha256(json.dumps(windows.ids).encode()).hexdigest()
        self._model_sha256 = model.fingerprint()

    def figures(self, folder: Path) -> dict[str, Any]:
        """`evaluation` as results.json has it."""
        path = folder / "weights.safetensors"
        wanted = {"weights": sha256_file(path), "windows": self._text, "model": self._model_sha256}
        kept = folder / "judged.json"
        if kept.is_file() and (found := json.loads(kept.read_text()))["key"] == wanted:
            return dict(found["evaluation"])
        candidate = replace(self._model, weights=Replaced(self._model.weights, path))
        evaluation = asdict(evaluate(TransformersEngine(candidate), self._original, self._windows))
        kept.write_text(json.dumps({"key": wanted, "evaluation": evaluation}))
        return evaluation
