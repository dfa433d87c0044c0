"""Tasks that choose among given answers, scored by lm-eval (extra `[eval]`) with one of our engines as its model; a built-in set needs no hub."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qforge.engines.base import Scorer
from qforge.errors import DataError, MissingCapabilityError, QforgeError
from qforge.text.builtin import builtin_folder
from qforge.text.chat import begins_with_bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = {"qforge_continuation": "task_continuation.jsonl", "qforge_sums": "task_sums.jsonl"}  # what `builtin` stands for
ACCURACIES = ("acc", "acc_norm", "exact_match")  # the metrics of one answer that are right (1) or wrong (0), or in some tasks parts of 1


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's answers to one task.

    Attributes:
        figures: lm-eval's own, metric -> value.
        right: per metric in ACCURACIES, for each question in order whether it was answered rightly (1.0 or 0.0), or to what part (truthfulqa_mc2: true answers' probability).
        protocol: what makes the figures comparable: task version, examples shown before a question, BOS, chat template, lm-eval's version.
    """

    figures: dict[str, float]
    right: dict[str, list[float]]
    protocol: dict[str, Any]


def missing() -> str | None:
    """None if lm-eval is installed; otherwise what to do."""
    return None if importlib.util.find_spec("lm_eval") else "evaluate.tasks needs lm-eval, which is not installed; pip install 'qforge[eval]'"


def version() -> str:
    """The installed version of lm-eval."""
    return importlib.metadata.version("lm_eval")


def expanded(tasks: Sequence[str]) -> list[str]:
    """The names of the tasks, each once; `builtin` stands for all built-in ones."""
    return list(dict.fromkeys(name for task in tasks for name in (BUILTIN if task == "builtin" else (task,))))


def check(tasks: Sequence[str]) -> None:
    """Refuse before work starts what cannot be scored.

    Raises:
        MissingCapabilityError: lm-eval is not installed.
        DataError: a task is unknown to it.
    """
    reason = missing() if tasks else None
    if reason is not None:
        raise MissingCapabilityError(reason)
    foreign = [name for name in expanded(tasks) if name not in BUILTIN]
    if foreign:
        from lm_eval.tasks import TaskManager

        known = set(TaskManager().all_tasks)
        unknown = [name for name in foreign if name not in known]
        if unknown:
            raise DataError(f"evaluate.tasks: {unknown[0]} is no task of lm-eval's; allowed are its names (lm-eval ls tasks), {', '.join(BUILTIN)}, and builtin for both")


def answer(tasks: Sequence[str], scorer: Scorer, tokenizer: PreTrainedTokenizerBase, context: int) -> dict[str, Answers]:
    """Score tasks by name (a group gives all of its tasks).

    Prompts are plain text: the chat template is not applied, and a BOS stands first where the tokenizer puts one before plain text. Seeds are lm-eval's own.

    Args:
        tasks: from `expanded`.
        scorer: the model's engine.
        tokenizer: the model's.
        context: tokens that the model takes.

    Raises:
        MissingCapabilityError: a task's data cannot be fetched.
        UnsupportedError: a task has the model write text, or measures perplexity.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    from qforge.engines.lm_eval_model import TaskModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = TaskManager(include_defaults=any(name not in BUILTIN for name in tasks))  # reading all of its own takes longer than the questions
    model = TaskModel(scorer, tokenizer, context)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its bars: one for each task and step
            asked = [task(name) if name in BUILTIN else name for name in tasks]
            found = lm_eval.simple_evaluate(model=model, tasks=asked, task_manager=known, bootstrap_iters=0, log_samples=True, verbosity="ERROR")
    except QforgeError:
        raise
    except (OSError, ValueError) as e:
        raise MissingCapabilityError(f"evaluate.tasks: {', '.join(tasks)}: lm-eval could not load the data ({e}); {', '.join(BUILTIN)} need none from elsewhere") from e
    assert found is not None
    protocol = {"lm_eval": version(), "engine": f"{scorer.name} {scorer.version}", "bos": begins_with_bos(tokenizer), "chat_template": False}
    return {name: _answers(name, found, protocol) for name in found["samples"]}


def task(name: str) -> dict[str, Any]:
    """A built-in task as lm-eval's configuration: four answers of which one is right, by likelihood, plain and per byte."""
    return {
        "task": name,
        "custom_dataset": lambda **kwargs: {"test": _records(name)},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
        "num_fewshot": 0,
        "metadata": {"version": 1},
    }


def _records(name: str) -> Any:
    import datasets

    lines = (builtin_folder() / BUILTIN[name]).read_text("utf-8").splitlines()
    return datasets.Dataset.from_list([json.loads(line) for line in lines])


def _answers(name: str, found: Any, protocol: dict[str, Any]) -> Answers:
    figures = {key.removesuffix(",none"): float(v) for key, v in found["results"][name].items() if isinstance(v, int | float) and "_stderr" not in key and "," in key}
    samples = sorted(found["samples"][name], key=lambda s: s["doc_id"])
    right = {metric: [float(s[metric]) for s in samples] for metric in ACCURACIES if samples and metric in samples[0]}
    shown = int((found.get("n-shot") or {}).get(name) or 0)
    return Answers(figures, right, {"version": (found.get("versions") or {}).get(name), "fewshot": shown, **protocol})
