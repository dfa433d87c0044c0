"""The table of starts beside llama.cpp, from what `benchmarks/startup.py --save` left in benchmarks/results, named after model and processor (startup-smollm2-zen4)."""

from __future__ import annotations

import statistics
from typing import Any

from speed_table import MODELS, PROCESSORS

ROWS = {"new": "new process", "warm": "warm process", "request": "further request"}
COLUMNS = ("model", "processor", *(f"{name}, ms (share of llama.cpp's time)" for name in ROWS.values()), "measured")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Medians of all rounds, and in brackets the median of the rounds' shares; below 1 ours is faster."""
    return "\n".join([HEAD, *(line for _, line in sorted(_line(name, found) for name, found in results.items()))])


def sentence(results: dict[str, dict[str, Any]]) -> str:
    """From the least to the most of what the table has."""
    new, warm = (_ranged([_share(found, row) for found in results.values()]) for row in ("new", "warm"))
    models = " and ".join(name for model, name in MODELS.items() if any(_of(found)[0] == model for found in results))
    return f"{models}: a new process has its first token in {new} of llama.cpp's time, one that has had the model open before in {warm}."


def _of(name: str) -> tuple[str, str]:
    """Model and processor."""
    model, _, processor = name.removeprefix("startup-").rpartition("-")
    return model, processor


def _line(name: str, found: dict[str, Any]) -> tuple[tuple[int, int], str]:
    """Where it belongs in the table, and the line."""
    model, processor = _of(name)
    rounds = found["rounds"]
    cells = [f"{statistics.median(ours[row] for ours, _ in rounds):.0f} ({_share(found, row):.2f})" for row in ROWS]
    measured = f"{found['environment']['date']}, {len(rounds)} rounds"
    return (list(MODELS).index(model), list(PROCESSORS).index(processor)), f"| {' | '.join([MODELS[model], PROCESSORS[processor], *cells, measured])} |"


def _share(found: dict[str, Any], row: str) -> float:
    return statistics.median(ours[row] / theirs[row] for ours, theirs in found["rounds"])


def _ranged(values: list[float]) -> str:
    least, most = (f"{value:.2f}".removeprefix("0") for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"
