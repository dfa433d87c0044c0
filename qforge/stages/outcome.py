"""What a run found, put together: gates, memory, environment, and the `Results` that everything else reads."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from qforge import __version__
from qforge.evaluate import gates
from qforge.machine_limits import usable_cores
from qforge.models.model import Model
from qforge.plan import Plan
from qforge.recipe import Recipe
from qforge.stages import guards
from qforge.stages.auto import Choice
from qforge.stages.estimates import Estimate
from qforge.stages.journal import Journal
from qforge.stages.meter import Meter
from qforge.stages.pieces import BlockPieces
from qforge.stages.texts import Texts
from qforge.types import Evaluation, ExportResult, LayerResult, Results


def assemble(
    recipe: Recipe,
    model: Model,
    plan: Plan,
    texts: Texts,
    artifact: dict[str, Any],
    evaluation: Evaluation | None,
    exports: Sequence[ExportResult],
    pieces: BlockPieces,
    journal: Journal,
    meter: Meter,
    estimate: Estimate,
    choice: Choice | None,
) -> Results:
    """The results of a finished run; gates are judged here."""
    size_ratio = artifact["weights_bytes"] / (2 * plan.parameters)
    figures = gates.figures(evaluation, size_ratio=size_ratio, bits_per_weight=plan.bits_per_weight, size_bytes=artifact["size_bytes"], peak_rss_bytes=meter.peak())
    return Results(
        qforge_version=__version__,
        recipe=recipe.to_dict(),
        recipe_sha256=recipe.sha256,
        model={
            "source": model.source,
            "parameters": plan.parameters,
            "sha256": artifact["model_sha256"],
            "dtype": str(model.dtype).removeprefix("torch."),
            "family": model.config.model_type,
        },
        artifact={
            "path": "model",
            "sha256": artifact["sha256"],
            "size_bytes": artifact["size_bytes"],
            "weights_bytes": artifact["weights_bytes"],
            "bits_per_weight": plan.bits_per_weight,
            "bits_per_parameter": 8 * artifact["weights_bytes"] / plan.parameters,
            "size_ratio": size_ratio,
            "original_bytes_at_16_bits": 2 * plan.parameters,
            "kv_cache": _kv_cache(recipe, pieces),
        },
        calibration=texts.described,
        evaluation=evaluation,
        exports=list(exports),
        gates=gates.check(figures, {name: (g.limit, g.on) for name, g in recipe.gates.items()}),
        layers=_layers(plan, pieces),
        adapters=[asdict(a) for a in model.adapters],
        work={"computed": journal.computed, "resumed": journal.resumed},
        timings=meter.seconds,
        parts={"quantize": meter.clock.seconds} if meter.clock.seconds else {},
        peak_rss_bytes=meter.peak(),
        memory=_memory(meter, estimate),
        environment=environment(),
        auto=None if choice is None else {**choice.described, "measured_kl": None if evaluation is None else evaluation.kl_mean},
        warnings=[
            *plan.notes,
            *texts.notes,
            *guards.noted(pieces.layers()),
            *guards.starved(pieces.layers(), plan),
            *guards.outliers(pieces.layers()),
            *guards.missed(recipe.quantize.budget, evaluation),
        ],
    )


def _kv_cache(recipe: Recipe, pieces: BlockPieces) -> dict[str, Any] | None:
    """How keys and values are kept, with the scales of keys and of values by attention module; None where the artifact does not say."""
    return {"type": recipe.quantize.kv_cache, "scales": dict(pieces.kv_scales)} if pieces.kv_scales else None


def _memory(meter: Meter, estimate: Estimate) -> dict[str, int]:
    """Measured resident bytes by stage, then what the largest stage is made of, as estimated from shapes."""
    measured = meter.resident | {f"peak during {name}": size for name, size in meter.peaks.items()}
    return measured | {f"of which in {estimate.peak_stage}, estimated: {name}": size for name, size in estimate.peak_bytes.items() if size}


def _layers(plan: Plan, pieces: BlockPieces) -> list[LayerResult]:
    done = {layer.name: layer for layer in pieces.layers()}
    return [done.get(p.name) or LayerResult(p.name, None, note=p.reason) for p in plan.layers]


def environment() -> dict[str, Any]:
    """Versions and machine, as results.json and `doctor` state them."""
    cpu = next((line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")), platform.processor())
    return {
        "qforge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": cpu,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
