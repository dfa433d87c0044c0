"""Runs a checkpoint in mlx-lm, by itself: a request file in, log-probabilities and a JSON answer out. Imports nothing of ours.

usage: python mlx_adapter.py REQUEST.json      (request and answer as in checkpoint_adapter.py)
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})

import mlx.core as mx
import numpy as np


def dequantized(module: Any) -> np.ndarray:
    """`[O, I]` as MLX's own code gives it."""
    return np.array(mx.dequantize(module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits))


def found(root: Any, name: str) -> Any:
    """A module by its dotted name."""
    for part in name.split("."):
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    return root


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request."""
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(request["model"]))
    model.set_dtype(mx.float32)
    kinds: dict[str, int] = {}
    with open(request["output"], "wb") as out:
        for prompt in request["prompts"]:
            logits = np.array(model(mx.array([prompt]))[0, -1].astype(mx.float32), dtype=np.float64)
            top = logits.max()
            (logits - top - np.log(np.exp(logits - top).sum())).astype(np.float32).tofile(out)
    weights = {}
    for name in request["modules"]:
        module = found(model, name)
        kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + 1
        weight = dequantized(module)
        weights[name] = [str(weight.dtype), hashlib.sha256(weight.tobytes()).hexdigest()]
    return {"version": version("mlx-lm"), "weights": weights, "linears": kinds}


def main() -> None:
    """Answer one request."""
    mx.set_default_device(mx.cpu)
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    try:
        given = answer(request)
    except Exception as e:
        given = {"error": f"{type(e).__name__}: {e}"}
    print("\n" + json.dumps(given), flush=True)


if __name__ == "__main__":
    main()
