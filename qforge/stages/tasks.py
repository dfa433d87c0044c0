"""Tasks of a run: both models' answers, kept in the journal one model and task set at a time, paired question by question."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import torch

from qforge.engines import tasks
from qforge.engines.base import Scorer
from qforge.engines.tasks import Answers
from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate import statistics
from qforge.files import sha256_file
from qforge.models.model import Model
from qforge.progress import Progress
from qforge.recipe import Recipe
from qforge.stages.evidence import engine_for
from qforge.stages.journal import Journal, key
from qforge.types import Evaluation, TaskMetric, TaskResult


def scored(recipe: Recipe, merged: Model, artifact: Model, evaluation: Evaluation, journal: Journal, progress: Progress) -> Evaluation:
    """The evaluation with the recipe's tasks: the artifact on the recipe's engine, the merged model on transformers in fp32.

    Args:
        recipe: names tasks and engine.
        merged, artifact: the two models.
        evaluation: of the text.
        journal: keeps each model's answers.
        progress: is told.
    """
    assert recipe.evaluate is not None
    names = tasks.expanded(recipe.evaluate.tasks)
    if not names:
        return evaluation
    progress.note(f"tasks: {', '.join(names)}")
    reference = _answers(names, merged, TransformersEngine(merged), journal)
    candidate = _answers(names, artifact, engine_for(artifact, recipe.evaluate.engine, recipe.run.activations), journal)
    return replace(evaluation, tasks={name: _paired(reference[name], candidate[name]) for name in candidate})


def _answers(names: list[str], model: Model, engine: Scorer, journal: Journal) -> dict[str, Answers]:
    tokenizer = {p.name: sha256_file(p) for p in sorted(model.assets.glob("*token*")) if p.is_file()}
    name = key("tasks", model=model.fingerprint(), tokenizer=tokenizer, engine=[engine.name, engine.version], tasks=names, lm_eval=tasks.version())
    found = journal.load(name)
    if found is None:
        context = getattr(model.config, "max_position_embeddings", None) or 2048
        made = tasks.answer(names, engine, model.tokenizer(), context)
        found = ({}, {task: asdict(a) for task, a in made.items()})
        journal.save(name, {"done": torch.ones(1)}, found[1])
    return {task: Answers(**a) for task, a in found[1].items()}


def _paired(reference: Answers, candidate: Answers) -> TaskResult:
    metrics = {name: _metric(name, reference, candidate) for name in candidate.figures if name in reference.figures}
    questions = max((len(r) for r in candidate.right.values()), default=0)
    return TaskResult(questions, metrics, candidate.protocol)


def _metric(name: str, reference: Answers, candidate: Answers) -> TaskMetric:
    both = reference.figures[name], candidate.figures[name]
    if name not in candidate.right or name not in reference.right:
        return TaskMetric(*both)
    a, b = (np.asarray(side.right[name]) for side in (reference, candidate))
    lost, gained = int((a > b).sum()), int((b > a).sum())
    flips = bool(np.isin([a, b], (0, 1)).all())
    difference = statistics.paired_shares(gained, lost, len(a)) if flips else statistics.mean(b - a, np.ones(len(a)))
    assert math.isclose(difference.value, both[1] - both[0], abs_tol=1e-9), f"lm-eval's {name} is not the mean of its answers"
    return TaskMetric(*both, difference.value, difference.interval, *((lost, gained, "".join(str(int(x)) for x in b)) if flips else ()))
