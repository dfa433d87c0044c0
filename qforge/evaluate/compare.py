"""One result held against another on the same text: paired differences with intervals, a verdict for each figure, gates on intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.errors import DataError
from qforge.evaluate import statistics
from qforge.evaluate.statistics import Interval, Verdict
from qforge.recipe.limits import Limit, parse_gate

# The smallest differences that matter. Measured on a 15M model at int4-g32 (GPTQ, 30,600 tokens): scales of one of 42 linears off by 5 % move KL divergence by +0.66 % of itself
# and perplexity by +0.12 %, which must be told apart; another calibration text moved them by +1.2 % (+-0.9 %) and -0.45 % (+-0.3 %, standard errors). So the margins separate
# "the same codes, damaged" from "the same", and on a long text also two honest runs with different calibration: --gate with a wider limit is for those.
PERPLEXITY_MARGIN = 0.001  # of the perplexity
KL_MARGIN = 0.0025  # of the baseline's KL divergence
KL_FLOOR = 2e-5  # nats: below that, arithmetic in another order
AGREEMENT_MARGIN = 0.002  # of all positions

GATE_NAMES = ("perplexity_ratio", "perplexity", "kl_mean", "kl_mean_change", "top1_agreement", "top1_agreement_change")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two files: where it is, its evaluation, and all of results.json where it is one."""

    path: Path
    evaluation: Mapping[str, Any]
    results: Mapping[str, Any] | None

    @property
    def clusters(self) -> list[Mapping[str, Any]]:
        """The evaluation's clusters."""
        clusters: list[Mapping[str, Any]] = self.evaluation["clusters"]
        return clusters

    def column(self, name: str) -> list[float]:
        """One sum of every cluster."""
        return [float(c[name]) for c in self.clusters]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides. `change` and its interval are `kind`: a `ratio` (perplexity) or a `difference`, candidate against baseline; `margin` in the same terms."""

    name: str
    baseline: float
    candidate: float
    kind: str
    change: float
    interval: Interval | None
    margin: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GateCheck:
    """A gate of the command line: it fails when the whole interval (without one: the value) is beyond the limit; `sure` tells whether the interval decides at all."""

    name: str
    limit: str
    value: float
    interval: Interval | None
    passed: bool
    sure: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `passed` decides the exit code."""

    rows: list[Row]
    gates: list[GateCheck]
    changed: list[str]
    notes: list[str]
    tokens: int
    clusters: int

    @property
    def passed(self) -> bool:
        """With gates: whether all hold. Without: whether no figure is worse."""
        return all(g.passed for g in self.gates) if self.gates else all(r.verdict.word != "worse" for r in self.rows)


def read(path: Path) -> Side:
    """Read results.json or what `eval --json` wrote.

    Raises:
        DataError: the file is missing, or neither of the two, or its evaluation is incomplete.
    """
    what = "give a results.json or a file that 'qforge eval --json' wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror or e}; {what}") from e
    except ValueError as e:
        raise DataError(f"{path} is no JSON ({e}); {what}") from e
    if not isinstance(data, dict):
        raise DataError(f"{path} holds no JSON object; {what}")
    results = data if "evaluation" in data else None
    evaluation = data["evaluation"] if results is not None else data
    if results is not None and evaluation is None:
        raise DataError(f"{path}: this run was not evaluated (evaluate: null), so there is nothing to compare")
    if problem := _problem(evaluation):
        raise DataError(f"{path}: {problem}; {what}")
    return Side(path, evaluation, results)


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


def compare(baseline: Side, candidate: Side, gates: Sequence[str] = ()) -> Comparison:
    """Hold `candidate` against `baseline`.

    Raises:
        DataError: they were measured on different texts, by different protocols, or on different tokens; or a gate is malformed or names a figure that is not there.
    """
    _check_comparable(baseline, candidate)
    sizes = baseline.column("tokens")
    both = all(side.evaluation.get("kl_mean") is not None for side in (baseline, candidate))
    rows = [_perplexity_row(baseline, candidate, sizes)]
    notes: list[str] = []
    if both:
        rows += [_kl_row(baseline, candidate, sizes), _agreement_row(baseline, candidate, sizes)]
        notes += _reference_note(baseline, candidate)
    else:
        notes.append("KL divergence and agreement are not compared: at least one side was evaluated without --against")
    checks = [_gate(text, rows, candidate, sizes) for text in gates]
    return Comparison(rows, checks, _changed(baseline, candidate), notes, int(sum(sizes)), len(sizes))


def _check_comparable(baseline: Side, candidate: Side) -> None:
    a, b = baseline.evaluation, candidate.evaluation
    if a["text_sha256"] != b["text_sha256"]:
        texts = " and ".join(_short(str(x["text_sha256"])) for x in (a, b))
        raise DataError(f"{baseline.path} and {candidate.path} were measured on different texts (sha256 {texts}); evaluate both on one text")
    if a["protocol"] != b["protocol"]:
        p, q = (x if isinstance(x, dict) else {"protocol": x} for x in (a["protocol"], b["protocol"]))
        keys = [k for k in sorted(p.keys() | q.keys()) if p.get(k) != q.get(k)]
        told = "; ".join(f"{k}: {p.get(k)!r} and {q.get(k)!r}" for k in keys)
        raise DataError(f"{baseline.path} and {candidate.path} were measured by different protocols ({told}); evaluate both with one protocol")
    if baseline.column("tokens") != candidate.column("tokens"):
        raise DataError(
            f"{baseline.path} and {candidate.path} cut the text into different clusters of tokens ({a['tokens']} and {b['tokens']} tokens), so they cannot be paired; "
            "compare models that share a tokenizer"
        )


def _paired(baseline: Side, candidate: Side, name: str, sizes: Sequence[float]) -> statistics.Mean:
    return statistics.mean([b - a for a, b in zip(baseline.column(name), candidate.column(name), strict=True)], sizes)


def _perplexity_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "nll_candidate", sizes)
    interval = change.interval and (math.exp(change.interval[0]), math.exp(change.interval[1]))
    a, b = (math.exp(math.fsum(s.column("nll_candidate")) / sum(sizes)) for s in (baseline, candidate))
    return Row("perplexity", a, b, "ratio", math.exp(change.value), interval, PERPLEXITY_MARGIN, statistics.verdict(change, math.log1p(PERPLEXITY_MARGIN)))


def _kl_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "kl_sum", sizes)
    a, b = (math.fsum(s.column("kl_sum")) / sum(sizes) for s in (baseline, candidate))
    margin = max(KL_MARGIN * a, KL_FLOOR)
    return Row("kl_mean", a, b, "difference", change.value, change.interval, margin, statistics.verdict(change, margin))


def _agreement_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "agree", sizes)
    lost = _paired(candidate, baseline, "agree", sizes)
    a, b = (math.fsum(s.column("agree")) / sum(sizes) for s in (baseline, candidate))
    return Row("top1_agreement", a, b, "difference", change.value, change.interval, AGREEMENT_MARGIN, statistics.verdict(lost, AGREEMENT_MARGIN))


def _reference_note(baseline: Side, candidate: Side) -> list[str]:
    a, b = (math.fsum(s.column("nll_reference")) / sum(s.column("tokens")) for s in (baseline, candidate))
    if abs(a - b) < 1e-4:
        return []
    return [f"the two were measured against different originals (perplexity {math.exp(a):.4f} and {math.exp(b):.4f}): KL divergence and agreement are each against its own"]


def _gate(text: str, rows: Sequence[Row], candidate: Side, sizes: Sequence[float]) -> GateCheck:
    """Test one `--gate`: `perplexity_ratio` is candidate / baseline, `*_change` is candidate - baseline, the other names are the candidate's own figures."""
    try:
        name, limit = parse_gate(text)
    except ValueError as e:
        raise DataError(f"--gate: {e}") from e
    known = _gate_figures(rows, candidate, sizes)
    if name not in known:
        raise DataError(f"--gate: {name} is not known here; allowed are {', '.join(n for n in GATE_NAMES if n in known)}")
    value, interval = known[name]()
    return _judge(name, limit, value, interval)


def _judge(name: str, limit: Limit, value: float, interval: Interval | None) -> GateCheck:
    if interval is None:
        return GateCheck(name, str(limit), value, None, limit.allows(value), False)
    inside = [limit.allows(end) for end in interval]
    return GateCheck(name, str(limit), value, interval, any(inside), all(inside) or not any(inside))


def _gate_figures(rows: Sequence[Row], candidate: Side, sizes: Sequence[float]) -> dict[str, Callable[[], tuple[float, Interval | None]]]:
    def own(column: str, wrap: Callable[[float], float] = float) -> Callable[[], tuple[float, Interval | None]]:
        def measure() -> tuple[float, Interval | None]:
            m = statistics.mean(candidate.column(column), sizes)
            return wrap(m.value), m.interval and (wrap(m.interval[0]), wrap(m.interval[1]))

        return measure

    by_name = {r.name: r for r in rows}
    found: dict[str, Callable[[], tuple[float, Interval | None]]] = {
        "perplexity": own("nll_candidate", math.exp),
        "perplexity_ratio": lambda: (by_name["perplexity"].change, by_name["perplexity"].interval),
    }
    if "kl_mean" in by_name:
        found |= {"kl_mean": own("kl_sum"), "top1_agreement": own("agree")}
        found |= {
            "kl_mean_change": lambda: (by_name["kl_mean"].change, by_name["kl_mean"].interval),
            "top1_agreement_change": lambda: (by_name["top1_agreement"].change, by_name["top1_agreement"].interval),
        }
    return found


def _changed(baseline: Side, candidate: Side) -> list[str]:
    """What else differs between the two runs, one line each."""
    lines = []
    for label, keys in _FACTS:
        a, b = (_find(side, keys) for side in (baseline, candidate))
        if a is not None and b is not None and a != b:
            lines.append(f"{label}: {_short(a)} -> {_short(b)}")
    return lines


_FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("engine", ("evaluation", "engine")),
    ("original's engine", ("evaluation", "reference_engine")),
    ("model", ("model", "source")),
    ("recipe", ("recipe_sha256",)),
    ("artifact", ("artifact", "sha256")),
    ("size in bytes", ("artifact", "size_bytes")),
    ("bits per weight", ("artifact", "bits_per_weight")),
    ("calibration text", ("calibration", "text_sha256")),
    ("qforge", ("qforge_version",)),
)


def _find(side: Side, keys: tuple[str, ...]) -> Any:
    value: Any = {**(side.results or {}), "evaluation": side.evaluation}
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
