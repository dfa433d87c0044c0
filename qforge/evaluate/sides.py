"""The two results of a comparison: read, checked, and their columns of sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.errors import DataError
from qforge.evaluate.checked import load, problem, typed
from qforge.types import Evaluation, ExportResult, GateResult, TaskResult

RESULTS = "results.json"  # in the folder of a run
_WANTED = "give a results.json, the folder of its run, or a file that 'qforge eval --json' wrote"


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

    @property
    def tasks(self) -> dict[str, TaskResult]:
        """The evaluation's tasks by name."""
        evaluation: Evaluation = typed("", self.evaluation)
        return evaluation.tasks

    @property
    def failures(self) -> list[str]:
        """What failed in the run itself: gates of its recipe, exports that are not the artifact."""
        gates: list[GateResult] = typed("gates", (self.results or {}).get("gates", []))
        exports: list[ExportResult] = typed("exports", (self.results or {}).get("exports", []))
        found = [f"gate {g.name} is {g.value:.6g}, the limit is {g.limit}" for g in gates if g.failed]
        return found + [f"export {e.format} is not the artifact, as read by {v.engine}" for e in exports for v in e.verified_by if not v.passed]

    def column(self, name: str) -> list[float]:
        """One sum of every cluster."""
        return [float(c[name]) for c in self.clusters]


def result_of(path: Path) -> Path:
    """The result that a path means: `results.json` in the folder of a run, else the file itself."""
    return path / RESULTS if (path / RESULTS).is_file() else path


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
        data = load(text)
    except ValueError as e:
        raise DataError(f"{name} is no JSON that can be used ({e}); {_WANTED}") from e
    if not isinstance(data, dict):
        raise DataError(f"{name} holds no JSON object; {_WANTED}")
    results = data if "evaluation" in data else None
    evaluation = data["evaluation"] if results is not None else data
    if results is not None and evaluation is None:
        raise DataError(f"{name}: this run was not evaluated (evaluate: null), so there is nothing to compare")
    if told := problem(data):
        raise DataError(f"{name}: {told}; {_WANTED}")
    return Side(name, evaluation, results)
