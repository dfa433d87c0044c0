"""One result held against another on the same text: paired differences with intervals, a verdict for each figure, gates on intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from qforge.errors import DataError
from qforge.evaluate import power, statistics
from qforge.evaluate.baseline import Past
from qforge.evaluate.changes import changes
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import Interval, Verdict
from qforge.recipe.limits import Limit, parse_gate

# The smallest differences that matter. Measured on a 15M model at int4-g32 (GPTQ, 30,600 tokens): scales of one of 42 linears off by 5 % move KL divergence by +0.66 % of itself
# and perplexity by +0.12 %, which must be told apart. Another draw of calibration tokens gives other codes, whose quality differs, too: of 110 ordered pairs of runs (tiny random
# model, GPTQ int4-g32, KL divergence 0.17, 11 seeds) perplexity moved by up to 2.4 % (0.14 of the divergence), the divergence by up to 8.9 % of itself, agreement by up to 0.02
# (0.07 of the disagreement). So, where both results tell that they were calibrated with different tokens of one text, only what is beyond that matters.
PERPLEXITY_MARGIN = 0.001  # of the perplexity
KL_MARGIN = 0.0025  # of the baseline's KL divergence
KL_FLOOR = 2e-5  # nats: below that, arithmetic in another order
AGREEMENT_MARGIN = 0.002  # of all positions
RECALIBRATED = 0.1  # of the baseline's KL divergence, and of its disagreement, where the draw of calibration tokens differs
RECALIBRATED_PERPLEXITY = 0.2  # of the baseline's KL divergence in nats, of log-perplexity

GATE_NAMES = ("perplexity_ratio", "perplexity", "kl_mean", "kl_mean_change", "top1_agreement", "top1_agreement_change", "size_bytes", "size_change", "bits_per_weight")


Figure = Callable[[], tuple[float, Interval | None]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides.

    Attributes:
        name: perplexity, kl_mean or top1_agreement.
        baseline, candidate: both values.
        kind: what `change`, its interval and `margin` are: a `ratio` (perplexity) or a `difference`, candidate against baseline.
        margin: the smallest difference that matters.
        detectable: the difference that a text like this one shows in four of five comparisons of this pair; None where nothing is known of the spread.
        verdict: what it comes to.
    """

    name: str
    baseline: float
    candidate: float
    kind: str
    change: float
    interval: Interval | None
    margin: float
    detectable: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GateCheck:
    """A gate of the command line: it fails when the whole interval (without one: the value) is beyond the limit.

    Attributes:
        name, limit, value, interval: the figure, the limit as text, what was measured.
        passed: the verdict.
        on: error, or warn (a failure is said and does not fail).
        beyond: how far the value lies on the wrong side of the limit; negative on the right side.
        confidence: how sure it is that the truth lies on the side where the value does (0.5 to 1); None without an interval.
    """

    name: str
    limit: str
    value: float
    interval: Interval | None
    passed: bool
    on: str
    beyond: float
    confidence: float | None

    @property
    def sure(self) -> bool:
        """Whether the 95 % interval decides."""
        return self.confidence is not None and self.confidence >= 0.975


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `passed` decides the exit code; `changed` maps a group (recipe, weights, ...) to lines."""

    baseline: str
    candidate: str
    rows: list[Row]
    gates: list[GateCheck]
    changed: dict[str, list[str]]
    notes: list[str]
    tokens: int
    clusters: int
    passed: bool
    history: list[Past] = field(default_factory=list)
    schema_version: int = 1


def compare(baseline: Side, candidate: Side, gates: Sequence[str] = ()) -> Comparison:
    """Hold `candidate` against `baseline`. With gates they decide; without, a figure that is worse fails.

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
    notes += [*_document_note(candidate), *_calibration_note(baseline, candidate)]
    checks = [_gate(text, rows, baseline, candidate, sizes) for text in gates]
    passed = all(c.passed or c.on == "warn" for c in checks) if checks else all(r.verdict.word != "worse" for r in rows)
    return Comparison(baseline.path, candidate.path, rows, checks, changes(baseline.whole, candidate.whole), notes, int(sum(sizes)), len(sizes), passed)


def _check_comparable(baseline: Side, candidate: Side) -> None:
    a, b = baseline.evaluation, candidate.evaluation
    if a["text_sha256"] != b["text_sha256"]:
        texts = " and ".join(str(x["text_sha256"])[:12] for x in (a, b))
        raise DataError(f"{baseline.path} and {candidate.path} were measured on different texts (sha256 {texts}); evaluate both on one text")
    if a["protocol"] != b["protocol"]:
        p, q = (x if isinstance(x, dict) else {"protocol": x} for x in (a["protocol"], b["protocol"]))
        if p.get("text_tokens") != q.get("text_tokens"):
            counts = " and ".join(str(x.get("text_tokens")) for x in (p, q))
            raise DataError(f"{baseline.path} and {candidate.path} cut one text into {counts} tokens: their tokenizers differ; compare models that share a tokenizer")
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


def _detectable(change: statistics.Mean, wrap: Callable[[float], float] = float) -> float | None:
    return wrap(power.detectable(change)) if math.isfinite(change.half_width) else None


def _perplexity_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "nll_candidate", sizes)
    interval = change.interval and (math.exp(change.interval[0]), math.exp(change.interval[1]))
    a, b = (math.exp(math.fsum(s.column("nll_candidate")) / sum(sizes)) for s in (baseline, candidate))
    margin = PERPLEXITY_MARGIN
    if _recalibrated(baseline, candidate) and baseline.evaluation.get("kl_mean") is not None:
        margin = max(margin, math.expm1(RECALIBRATED_PERPLEXITY * math.fsum(baseline.column("kl_sum")) / sum(sizes)))
    verdict = statistics.verdict(change, math.log1p(margin))
    return Row("perplexity", a, b, "ratio", math.exp(change.value), interval, margin, _detectable(change, math.expm1), verdict)


def _kl_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "kl_sum", sizes)
    a, b = (math.fsum(s.column("kl_sum")) / sum(sizes) for s in (baseline, candidate))
    margin = max((RECALIBRATED if _recalibrated(baseline, candidate) else KL_MARGIN) * a, KL_FLOOR)
    return Row("kl_mean", a, b, "difference", change.value, change.interval, margin, _detectable(change), statistics.verdict(change, margin))


def _agreement_row(baseline: Side, candidate: Side, sizes: Sequence[float]) -> Row:
    change = _paired(baseline, candidate, "agree", sizes)
    lost = _paired(candidate, baseline, "agree", sizes)
    a, b = (math.fsum(s.column("agree")) / sum(sizes) for s in (baseline, candidate))
    margin = max(AGREEMENT_MARGIN, RECALIBRATED * (1 - a) if _recalibrated(baseline, candidate) else 0.0)
    return Row("top1_agreement", a, b, "difference", change.value, change.interval, margin, _detectable(change), statistics.verdict(lost, margin))


def _reference_note(baseline: Side, candidate: Side) -> list[str]:
    a, b = (math.fsum(s.column("nll_reference")) / sum(s.column("tokens")) for s in (baseline, candidate))
    if abs(a - b) < 1e-4:
        return []
    return [f"the two were measured against different originals (perplexity {math.exp(a):.4f} and {math.exp(b):.4f}): KL divergence and agreement are each against its own"]


def _document_note(candidate: Side) -> list[str]:
    protocol = candidate.evaluation["protocol"]
    note = "the text is one document, whose windows are taken as independent: the intervals tell of this text, not of others like it; give several documents (.jsonl, one a line)"
    return [note] if isinstance(protocol, dict) and protocol.get("cluster") == "window" else []


def _calibration(side: Side) -> Mapping[str, Any]:
    found = (side.results or {}).get("calibration")
    return found if isinstance(found, dict) else {}


def _recalibrated(baseline: Side, candidate: Side) -> bool:
    """Whether both results tell that they were calibrated with different tokens of one text."""
    a, b = (_calibration(side) for side in (baseline, candidate))
    return a.get("text_sha256") is not None and a.get("text_sha256") == b.get("text_sha256") and a.get("sha256") != b.get("sha256")


def _calibration_note(baseline: Side, candidate: Side) -> list[str]:
    """That another calibration widens what is the same; what is wrong with the candidate's calibration text, where a run has noticed it."""
    wider = "calibrated with different tokens of one text, which alone gives such models: differences matter from a tenth of the KL divergence and of the disagreement on"
    warning = (_calibration(candidate).get("likeness") or {}).get("warning")
    return [wider] * _recalibrated(baseline, candidate) + [f"calibration of the candidate: {warning}"] * bool(warning)


def _gate(text: str, rows: Sequence[Row], baseline: Side, candidate: Side, sizes: Sequence[float]) -> GateCheck:
    """Test one `--gate`: `perplexity_ratio` and `size_change` are candidate / baseline, `*_change` otherwise candidate - baseline, the other names the candidate's own figures."""
    warns, _, rest = text.partition(":") if text.lstrip().startswith("warn:") else ("", "", text)
    try:
        name, limit = parse_gate(rest)
    except ValueError as e:
        raise DataError(f"--gate: {e}") from e
    known = _gate_figures(rows, candidate, sizes) | _size_figures(baseline, candidate)
    if name not in known:
        raise DataError(f"--gate: {name} is not known here; allowed are {', '.join(n for n in GATE_NAMES if n in known)}")
    value, interval = known[name]()
    return _judge(name, limit, value, interval, "warn" if warns else "error")


def _judge(name: str, limit: Limit, value: float, interval: Interval | None, on: str) -> GateCheck:
    beyond = (value - limit.bound) * (1 if limit.upper else -1)
    if interval is None:
        return GateCheck(name, str(limit), value, None, limit.allows(value), on, beyond, None)
    passed = any(limit.allows(end) for end in interval)
    end = interval[0] if value > limit.bound else interval[1]  # the end of the interval towards the limit
    width = abs(value - end)
    confidence = NormalDist().cdf(1.959964 * abs(value - limit.bound) / width) if width else 1.0
    return GateCheck(name, str(limit), value, interval, passed, on, beyond, confidence)


def _gate_figures(rows: Sequence[Row], candidate: Side, sizes: Sequence[float]) -> dict[str, Figure]:
    def own(column: str, wrap: Callable[[float], float] = float) -> Figure:
        def measure() -> tuple[float, Interval | None]:
            m = statistics.mean(candidate.column(column), sizes)
            return wrap(m.value), m.interval and (wrap(m.interval[0]), wrap(m.interval[1]))

        return measure

    by_name = {r.name: r for r in rows}
    found: dict[str, Figure] = {
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


def _size_figures(baseline: Side, candidate: Side) -> dict[str, Figure]:
    """Figures of the artifact, which have no interval because nothing is sampled."""
    ours, theirs = ((side.results or {}).get("artifact") or {} for side in (candidate, baseline))
    found: dict[str, Figure] = {}
    for name in ("size_bytes", "bits_per_weight"):
        if isinstance(value := ours.get(name), int | float):
            found[name] = _exact(value)
    if ours.get("size_bytes") and theirs.get("size_bytes"):
        found["size_change"] = _exact(ours["size_bytes"] / theirs["size_bytes"])
    return found


def _exact(value: float) -> Figure:
    return lambda: (float(value), None)
