"""A run of ours: `qforge quantize` in a process of its own; its artifact as plain fp32 tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from peers import floor
from peers.libraries import resident
from peers.runs import Run
from peers.texts import Tokens
from qforge.models.model import Model, open_model

MIB = 2**20


def run(job: Run, model: Path, tokens: Tokens, folder: Path) -> None:
    """Quantize with the calibration ids that the peers see; leaves the artifact in `run` and meter.json in `folder`.

    Raises:
        RuntimeError: the run failed, or was calibrated on other ids.
    """
    (folder / "recipe.yaml").write_text(json.dumps(recipe(job, model, tokens), indent=1))
    load, before, start = os.getloadavg()[0], floor.rate(), time.perf_counter()
    command = [sys.executable, "-m", "qforge", "quantize", "--recipe", str(folder / "recipe.yaml"), "--out", str(folder / "run"), "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    after, forward = floor.rate(), floor.forward_seconds(model, tokens.calibration.ids)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"qforge ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    results = json.loads((folder / "run" / "results.json").read_text())
    seen = results["calibration"] and results["calibration"]["sampled_sha256"]
    if seen not in (None, tokens.calibration.sha256):
        raise RuntimeError(f"the run was calibrated on the ids {seen}, the peers see {tokens.calibration.sha256}")
    around = {"process_s": round(seconds, 2), "load": load, "multiplications_per_s": (before + after) / 2, "forward_s": round(forward, 2)}
    (folder / "meter.json").write_text(json.dumps(cost(job, results) | around, indent=1))


def dequantize(folder: Path, model: Path) -> None:
    """Write what a run in `folder` has changed in a model to weights.safetensors, for the judge."""
    save_file(changed(open_model(str(folder / "run")), open_model(str(model))), folder / "weights.safetensors")


def recipe(job: Run, model: Path, tokens: Tokens) -> dict[str, Any]:
    """The recipe as YAML's JSON subset."""
    methods = job.method.split("+")
    samples, length = tokens.calibration.ids.shape
    options = dict(job.options)
    generated = options.pop("generated", 0)  # sequences that the model writes itself, besides those that all tools are given
    limit, budget, candidates = (options.pop(name, None) for name in ("memory_limit", "budget", "candidates"))
    chosen = {"scheme": job.scheme} if budget is None else {"budget": f"{budget} bits", "candidates": candidates.split("+") if candidates else []}
    return {
        "version": 1,
        "model": {"source": str(model.resolve())},
        "calibration": {"source": str(tokens.calibration_file.resolve()), "samples": samples, "sequence_length": length, "generated": generated, "seed": 0},
        "quantize": {"method": methods if len(methods) > 1 else methods[0], "options": options} | chosen,
        "evaluate": None,
        "run": {"memory_limit": limit},
    }


def changed(artifact: Model, original: Model) -> dict[str, torch.Tensor]:
    """The artifact's tensors that are not the original's, dequantized to fp32, under their Hugging Face names."""
    before = set(original.weights.names())
    tensors = {}
    for name in artifact.weights.names():
        tensor = artifact.weights.read(name).float()
        if name not in before or not torch.equal(tensor, original.weights.read(name).float()):
            tensors[name] = tensor.contiguous()
    return tensors


def cost(job: Run, results: dict[str, Any]) -> dict[str, Any]:
    """What run_peer.py writes for the others: the work without opening and tokenizing, but with choosing and writing text; memory before quantizing, and at its peak."""
    seconds, memory = results["timings"], results["memory"]
    measured = [stage for stage in ("choose", "quantize", "write") if stage in seconds] + (["texts"] if dict(job.options).get("generated") else [])
    return {
        "name": f"{job.name} {job.scheme}",
        "wall_s": round(sum(seconds[stage] for stage in measured), 2),
        "rss_libraries_mb": resident(sys.executable, job.tool),
        "rss_before_mb": round(memory["before quantize"] / MIB),
        "rss_peak_mb": round(max(memory[f"peak during {stage}"] for stage in measured) / MIB),
        "rss_peak_process_mb": round(results["peak_rss_bytes"] / MIB),
        "bits_per_weight": results["artifact"]["bits_per_weight"],
        "timings": seconds,
        "versions": {"qforge": results["qforge_version"], **{name: results["environment"][name] for name in ("torch", "transformers")}},
        "warnings": results["warnings"],
    }
