"""What two results say of the same tasks: accuracies, paired question by question where both kept their answers, else as two shares of as many questions."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from qforge.evaluate import statistics
from qforge.evaluate.rows import Figure, Row, detectable, negative, of_mean, same_artifact
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import NORMAL_975, Mean
from qforge.types import TaskMetric, TaskResult

MARGIN = 0.01  # of all questions


def task_rows(baseline: Side, candidate: Side) -> tuple[list[Row], dict[str, Figure], list[str]]:
    """Rows, gate figures (`TASK.METRIC`, `TASK.METRIC_change`; without `TASK.` where one task has the metric) and notes.

    Intervals of the rows hold together (Bonferroni): of many tasks one would look worse by chance.
    """
    before, after = baseline.tasks, candidate.tasks
    sides = (("baseline", before, after), ("candidate", after, before))
    notes = [f"task {name} is not compared: only the {side} has it" for side, one, other in sides for name in one if name not in other]
    shared: dict[tuple[str, str], tuple[TaskMetric, TaskMetric]] = {}
    metrics: list[str] = []  # also those without a row, so that another task's figure does not stand for them
    for name in (n for n in before if n in after):
        if told := _otherwise(before[name], after[name]):
            notes.append(f"task {name} is not compared: it was asked otherwise ({told})")
            continue
        metrics += after[name].metrics
        for metric, b in after[name].metrics.items():
            a = before[name].metrics.get(metric)
            if a is not None and a.lost is not None and b.lost is not None:  # right or wrong
                shared[name, metric] = a, b
    same = same_artifact(baseline, candidate)
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    for (name, metric), (a, b) in shared.items():
        change = _change(a, b, after[name].questions)
        if same and a.right == b.right:  # however few the questions: of one artifact it is known that nothing differs
            change = replace(change, error=0.0, interval=(0.0, 0.0))
        change = _together(change, len(shared))
        verdict = statistics.verdict(negative(change), MARGIN)
        rows.append(Row(f"{name}.{metric}", a.candidate, b.candidate, "difference", change.value, change.interval, MARGIN, detectable(change), verdict, "questions"))
        for title in (f"{name}.{metric}", *([metric] if metrics.count(metric) == 1 else [])):
            figures |= {title: of_mean(_share(b.candidate, after[name].questions), MARGIN, unit="questions"), f"{title}_change": of_mean(change, MARGIN, unit="questions")}
    return rows, figures, notes


def _otherwise(a: TaskResult, b: TaskResult) -> str:
    """What differs in how a task was asked; whichever engine answered."""
    p, q = ({**side.protocol, "questions": side.questions, "engine": None} for side in (a, b))
    return "; ".join(f"{k}: {p.get(k)} and {q.get(k)}" for k in sorted(p.keys() | q.keys()) if p.get(k) != q.get(k))


def _change(a: TaskMetric, b: TaskMetric, questions: int) -> Mean:
    if a.right is not None and b.right is not None:
        pairs = list(zip(a.right, b.right, strict=True))
        return statistics.paired_shares(pairs.count(("0", "1")), pairs.count(("1", "0")), questions)
    # Agresti and Caffo 2000: one right and one wrong answer more on each side
    p, q = ((share * questions + 1) / (questions + 2) for share in (a.candidate, b.candidate))
    error = math.sqrt((p * (1 - p) + q * (1 - q)) / (questions + 2))
    return Mean(b.candidate - a.candidate, error, (q - p - NORMAL_975 * error, q - p + NORMAL_975 * error), questions, questions)


def _share(share: float, questions: int) -> Mean:
    """A share of questions, each answered on its own, with Wilson's interval (1927)."""
    z2 = NORMAL_975**2 / questions
    middle, width = (share + z2 / 2) / (1 + z2), math.sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return Mean(share, math.sqrt(share * (1 - share) / questions), (max(0.0, middle - width), min(1.0, middle + width)), questions, questions)


def _together(mean: Mean, count: int) -> Mean:
    wider = NormalDist().inv_cdf(1 - 0.025 / count) / NORMAL_975
    return replace(mean, interval=mean.interval and (mean.value + wider * (mean.interval[0] - mean.value), mean.value + wider * (mean.interval[1] - mean.value)))
