"""The two results of a comparison: read, checked, and their columns of sums."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.errors import DataError

_WANTED = "give a results.json or a file that 'qforge eval --json' wrote"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two results: what it is called, its evaluation, and all of results.json where it is one."""

    path: str
    evaluation: Mapping[str, Any]
    results: Mapping[str, Any] | None

    @property
    def whole(self) -> dict[str, Any]:
        """As results.json has it; of an evaluation alone, only that part."""
        return {**(self.results or {}), "evaluation": self.evaluation}

    @property
    def clusters(self) -> list[Mapping[str, Any]]:
        """The evaluation's clusters."""
        clusters: list[Mapping[str, Any]] = self.evaluation["clusters"]
        return clusters

    def column(self, name: str) -> list[float]:
        """One sum of every cluster."""
        return [float(c[name]) for c in self.clusters]


def read(path: Path) -> Side:
    """Read results.json or what `eval --json` wrote.

    Raises:
        DataError: the file is missing, or neither of the two, or its evaluation is incomplete.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}; {_WANTED}") from e
    except ValueError as e:
        raise DataError(f"{path} is no JSON ({e}); {_WANTED}") from e
    return parse(text, str(path))


def parse(text: str, name: str) -> Side:
    """The same from the text of such a file; `name` is what messages call it.

    Raises:
        DataError: see `read`.
    """
    try:
        data = json.loads(text)
    except ValueError as e:
        raise DataError(f"{name} is no JSON ({e}); {_WANTED}") from e
    if not isinstance(data, dict):
        raise DataError(f"{name} holds no JSON object; {_WANTED}")
    results = data if "evaluation" in data else None
    evaluation = data["evaluation"] if results is not None else data
    if results is not None and evaluation is None:
        raise DataError(f"{name}: this run was not evaluated (evaluate: null), so there is nothing to compare")
    if problem := _problem(evaluation):
        raise DataError(f"{name}: {problem}; {_WANTED}")
    return Side(name, evaluation, results)


def _problem(evaluation: Any) -> str | None:
    """What keeps an object from being an evaluation, or None."""
    if not isinstance(evaluation, dict):
        return "the evaluation is no JSON object"
    if missing := [k for k in ("text_sha256", "protocol", "tokens", "candidate", "clusters") if k not in evaluation]:
        return f"this is no evaluation: {', '.join(missing)} is missing"
    clusters = evaluation["clusters"]
    if not isinstance(clusters, list) or not clusters or not all(isinstance(c, dict) for c in clusters):
        return "clusters is no list of objects"
    names = ("tokens", "nll_candidate", *(("nll_reference", "kl_sum", "agree") if evaluation.get("kl_mean") is not None else ()))
    for index, cluster in enumerate(clusters):
        for name in names:
            value = cluster.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or (name == "tokens" and value <= 0):
                return f"clusters[{index}].{name} is {value!r}, not a number that can be used"
    return None
