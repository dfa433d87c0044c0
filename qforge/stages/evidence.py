"""Measuring: the candidate's engine beside the reference's, on the same windows."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from qforge.engines.base import Scorer
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import UnsupportedError
from qforge.evaluate.divergence import evaluate
from qforge.evaluate.greedy import departures
from qforge.evaluate.spelling import spelled
from qforge.models.model import Model
from qforge.progress import Progress
from qforge.runtime.decoder import supports
from qforge.stages.journal import Journal, key
from qforge.stages.reference import KeptReference, base_figures
from qforge.text.windows import EvaluationWindows
from qforge.types import Cluster, DeltaP, Evaluation, Flips, Greedy, Guess, Histogram, PositionBin, TaskMetric, TaskResult, WorstToken

KEPT_BYTES = 1 << 28  # of a reference's states, up to which a run keeps them for the next one with another recipe (the demo's are 47 MB)


def only_runtime(other: str, activations: str, device: str, tensor_parallel: int) -> None:
    """Refuse what only our runtime does; `other`: what computes instead.

    Raises:
        UnsupportedError: one of them is not what it is by default.
    """
    for field, given, usual in (("activations", activations, "fp"), ("device", device, "cpu"), ("tensor_parallel", tensor_parallel, 1)):
        if given != usual:
            raise UnsupportedError(f"{field}: {given} is for the built-in runtime, and {other}; use {field}: {usual}")


def engine_for(model: Model, name: str, activations: str = "fp", device: str = "cpu", tensor_parallel: int = 1) -> Scorer:
    """The engine that a recipe or flag names; `auto` takes our runtime where it runs the family, else transformers.

    Args:
        model: whose family decides.
        name: `auto`, `runtime` or `transformers`.
        activations: one of `ACTIVATIONS` (qforge/scheme.py).
        device, tensor_parallel: of the runtime.

    Raises:
        UnsupportedError: `runtime` was asked for and does not run this model; or activations are to be rounded, or a GPU used, and it is not what runs it.
    """
    reason = supports(model.spec)
    if name == "transformers" or reason is not None:
        only_runtime(f"this runs on transformers{'' if reason is None else f' ({reason})'}", activations, device, tensor_parallel)
    if name == "transformers" or (name == "auto" and reason is not None):
        return TransformersEngine(model)
    if reason is not None:
        raise UnsupportedError(f"engine runtime: {reason}; use engine: transformers")
    return RuntimeEngine(model, activations=activations, device=device, tensor_parallel=tensor_parallel)


def measure(candidate: Model, scorer: Scorer, reference: Model | None, windows: EvaluationWindows, progress: Progress, *, kept: Scorer | None = None) -> Evaluation:
    """Evaluate one model, as `scorer` computes it, beside another if there is one, which transformers' code computes in fp32.

    Args:
        candidate: whose tokenizer spells tokens.
        scorer: an engine that also writes continuations has them compared, too.
        reference: the original.
        windows: the text.
        progress: is told.
        kept: the reference's scores of these windows, where they are kept.
    """
    original = None if reference is None else TransformersEngine(reference)
    found = evaluate(scorer, kept or original, windows, progress=progress)
    if original is not None and isinstance(scorer, RuntimeEngine):
        found = replace(found, greedy=departures(scorer, original, windows))
    tokenizer = candidate.tokenizer()
    return spelled(found, windows.ids, lambda ids: str(tokenizer.decode(ids)))


def measure_artifact(
    engine: str, activations: str, base: Model, merged: Model, artifact: Model, key_parts: dict[str, Any], windows: EvaluationWindows, journal: Journal, progress: Progress,
    *, shared: bool = False,
) -> Evaluation:  # fmt: skip
    """The artifact against the merged, unquantized model, the base's own perplexity beside them; kept in the journal.

    Args:
        engine, activations: as the recipe names them.
        base: the model before adapters were merged.
        merged: the reference.
        artifact: opened from disk.
        key_parts: hashes of merged model and artifact.
        windows: the text.
        journal: keeps the result.
        progress: is told.
        shared: other runs with this journal have the same reference, so that it is kept for them whatever its size.
    """
    name = key("evaluation", form=3, engine=engine, activations=activations, text=windows.sha256, protocol=windows.protocol, **key_parts)
    found = journal.load(name)
    if found is not None:
        return evaluation_from(found[1])
    size = 4 * sum(map(len, windows.ids)) * merged.config.hidden_size
    kept = KeptReference(merged, windows, journal) if shared or size <= KEPT_BYTES else None
    evaluation = measure(artifact, engine_for(artifact, engine, activations), merged, windows, progress, kept=kept)
    if merged.adapters:
        evaluation = replace(evaluation, base=base_figures(base, windows, journal, progress))
    journal.save(name, {"done": torch.ones(1)}, asdict(evaluation))
    return evaluation


def evaluation_from(value: dict[str, Any]) -> Evaluation:
    """An evaluation from its JSON form."""
    made = {**_tuples(value), "clusters": [Cluster(**c) for c in value["clusters"]]}
    made["kl_by_position"] = [PositionBin(**b) for b in value["kl_by_position"]]
    made["worst_tokens"] = [_worst_token(w) for w in value["worst_tokens"]]
    made["tasks"] = {name: task_from(task) for name, task in value["tasks"].items()}
    for name, kind in (("delta_p", DeltaP), ("flips", Flips), ("greedy", Greedy), ("kl_histogram", Histogram)):
        made[name] = None if value[name] is None else kind(**_tuples(value[name]))
    return Evaluation(**made)


def task_from(value: dict[str, Any]) -> TaskResult:
    """A task's result from its JSON form."""
    return TaskResult(**{**value, "metrics": {name: TaskMetric(**_tuples(m)) for name, m in value["metrics"].items()}})


def _tuples(value: dict[str, Any]) -> dict[str, Any]:
    """Intervals as pairs, in objects within, too: JSON has only lists."""
    return {k: tuple(v) if k.endswith("_ci95") and v is not None else _tuples(v) if isinstance(v, dict) else v for k, v in value.items()}


def _worst_token(value: dict[str, Any]) -> WorstToken:
    return WorstToken(**{**value, **{name: [Guess(**g) for g in value[name]] for name in ("expected", "expected_reference")}})
