"""llm-compressor's schemes of eight bits on both sides, under its own interpreter: a checkpoint as compressed-tensors saves it, and what making it cost.

eight_bits_adapter.py METHOD SCHEME --tools DIR --model DIR --calibration ids.json --out DIR
    METHOD: rtn, gptq, smoothquant, smoothquant+gptq (SmoothQuant's strength 0.8, as its examples have it)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

SCHEMES = {"w8a8-int8": "W8A8", "fp8-dynamic": "FP8_DYNAMIC"}  # ours -> compressed-tensors' preset: per channel, activations by token
STRENGTH = 0.8


def recipe(method: str, scheme: str) -> list[Any]:
    """The modifiers of a method."""
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    parts: dict[str, Any] = {
        "rtn": lambda: QuantizationModifier(targets="Linear", scheme=SCHEMES[scheme], ignore=["lm_head"]),
        "gptq": lambda: GPTQModifier(targets="Linear", scheme=SCHEMES[scheme], ignore=["lm_head"]),
        "smoothquant": lambda: SmoothQuantModifier(smoothing_strength=STRENGTH),
    }
    names = method.split("+")
    return [parts[name]() for name in ([*names, "rtn"] if names == ["smoothquant"] else names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("scheme", choices=SCHEMES)
    for flag in ("--tools", "--model", "--calibration", "--out"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args()
    sys.path.insert(0, args.tools)
    shared = importlib.import_module("run_peer")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from datasets import Dataset
    from llmcompressor import oneshot

    model, tokenizer = shared.load(args.model)
    ids = json.loads(Path(args.calibration).read_text())
    data = Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids])
    with shared.Meter() as meter:
        oneshot(model=model, processor=tokenizer, dataset=data, recipe=recipe(args.method, args.scheme), max_seq_length=len(ids[0]), num_calibration_samples=len(ids))
    model.save_pretrained(Path(args.out) / "checkpoint", save_compressed=True)
    (Path(args.out) / "meter.json").write_text(json.dumps({"name": f"llmcompressor {args.method} {args.scheme}", **meter.cost}))


if __name__ == "__main__":
    main()
