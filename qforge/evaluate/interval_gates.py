"""Gates of `compare`: limits on figures, tested on the interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from qforge.errors import DataError
from qforge.evaluate.rows import Figure, exact
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import NORMAL_975, Interval
from qforge.recipe.limits import Limit, parse_gate


@dataclass(frozen=True, slots=True)
class GateCheck:
    """A gate of the command line: it fails when the whole interval is beyond the limit. A sampled figure without an interval cannot be judged, and does not pass.

    Attributes:
        name, limit, value, interval: the figure, the limit as text, what was measured.
        passed: the verdict.
        on: error, or warn (a failure is said and does not fail).
        beyond: how far the value lies on the wrong side of the limit; negative on the right side.
        confidence: how sure it is that the truth lies on the side where the value does (0.5 to 1); None without an interval.
        needs: where the gate cannot be judged, about how many tokens (or questions, see `unit`) would tell; else None.
    """

    name: str
    limit: str
    value: float
    interval: Interval | None
    passed: bool
    on: str
    beyond: float
    confidence: float | None
    needs: int | None = None
    unit: str = "tokens"

    @property
    def sure(self) -> bool:
        """Whether the 95 % interval decides."""
        return self.confidence is not None and self.confidence >= 0.975

    @property
    def failed(self) -> bool:
        """Whether the limit is broken, and that matters."""
        return not self.passed and self.needs is None and self.on == "error"


def check(text: str, figures: Mapping[str, Figure]) -> GateCheck:
    """Test one `--gate`.

    Raises:
        DataError: it is malformed, or names a figure that is not there.
    """
    warns, _, rest = text.partition(":") if text.lstrip().startswith("warn:") else ("", "", text)
    try:
        name, limit = parse_gate(rest)
    except ValueError as e:
        raise DataError(f"--gate: {e}") from e
    if name not in figures:
        raise DataError(f"--gate: {name} is not known here; allowed are {', '.join(figures)}")
    return _judge(name, limit, figures[name], "warn" if warns else "error")


def _judge(name: str, limit: Limit, figure: Figure, on: str) -> GateCheck:
    value, interval = figure.value, figure.interval
    beyond = (value - limit.bound) * (1 if limit.upper else -1)
    if interval is None:
        needs = figure.needs(limit.bound)
        return GateCheck(name, str(limit), value, None, limit.allows(value) and needs is None, on, beyond, None, needs, figure.unit)
    passed = any(limit.allows(end) for end in interval)
    end = interval[0] if value > limit.bound else interval[1]  # the end of the interval towards the limit
    width = abs(value - end)
    confidence = NormalDist().cdf(NORMAL_975 * abs(value - limit.bound) / width) if width else 1.0
    return GateCheck(name, str(limit), value, interval, passed, on, beyond, confidence, unit=figure.unit)


def size_figures(baseline: Side, candidate: Side) -> dict[str, Figure]:
    """Figures of the artifact."""
    ours, theirs = ((side.results or {}).get("artifact") or {} for side in (candidate, baseline))
    found = {name: exact(ours[name]) for name in ("size_bytes", "bits_per_weight") if _number(ours.get(name))}
    if _number(ours.get("size_bytes")) and _number(theirs.get("size_bytes")) and theirs["size_bytes"] > 0:
        found["size_change"] = exact(ours["size_bytes"] / theirs["size_bytes"])
    return found


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
