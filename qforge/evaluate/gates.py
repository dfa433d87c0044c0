"""Gates: limits on a run's figures, tested on the point value, reported with the interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qforge.errors import RecipeError
from qforge.recipe.limits import EVALUATED, FIGURES, parse_limit
from qforge.types import Evaluation, GateResult

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number and, where there is one, its 95 % interval."""

    value: float
    interval: Interval | None = None


def figures(evaluation: Evaluation | None, **measured: float | None) -> dict[str, Figure]:
    """Every figure that a gate can name and that this run measured; `measured` holds what is no part of the evaluation (`size_ratio=...`)."""
    found = {name: Figure(float(value)) for name, value in measured.items() if value is not None}
    unknown = set(found) - set(FIGURES)
    assert not unknown, f"no such figure: {unknown}"
    if evaluation is None:
        return found
    e = evaluation
    for name in EVALUATED:
        if name in ("perplexity", "bits_per_byte"):
            value, interval = e.candidate.get(name), e.candidate.get(f"{name}_ci95")
        elif name == "delta_p_rms":
            value, interval = (None, None) if e.delta_p is None else (e.delta_p.rms, e.delta_p.rms_ci95)
        elif name == "lost":
            value, interval = (None, None) if e.flips is None else (e.flips.lost, e.flips.lost_ci95)
        else:
            value, interval = getattr(e, name), getattr(e, f"{name}_ci95", None)
        if value is not None:
            found[name] = Figure(value, interval)
    return found


def check(found: Mapping[str, Figure], gates: Mapping[str, tuple[str, str]]) -> list[GateResult]:
    """Test limits, in the order in which they are given. A gate that is `off` is not tested and not listed.

    Args:
        found: from `figures`.
        gates: figure name -> (limit such as "<= 1.30", on: error, warn or off), as a recipe has been checked to have them.

    Raises:
        RecipeError: a gate's figure was not measured.
    """
    return [_check(name, limit, on, found) for name, (limit, on) in gates.items() if on != "off"]


def _check(name: str, limit: str, on: str, found: Mapping[str, Figure]) -> GateResult:
    if name not in found:
        raise RecipeError(f"gates.{name}: this figure was not measured; measured are {', '.join(found) or 'none'}")
    figure = found[name]
    return GateResult(name, limit, figure.value, parse_limit(limit).allows(figure.value), on, figure.interval)
