"""One result held against another on the same text: paired differences with intervals, a verdict for each figure, gates on intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from qforge.errors import DataError
from qforge.evaluate.baseline import Past
from qforge.evaluate.changes import changes, find
from qforge.evaluate.interval_gates import GateCheck, check, size_figures
from qforge.evaluate.rows import Row, recalibrated, text_rows
from qforge.evaluate.sides import Side
from qforge.evaluate.statistics import exponential
from qforge.evaluate.task_rows import task_rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found. `changed` maps a group (recipe, weights, ...) to lines; `failures`: what failed in the candidate's own run; `clusters` are `cluster`s (documents)."""

    baseline: str
    candidate: str
    rows: list[Row]
    gates: list[GateCheck]
    changed: dict[str, list[str]]
    notes: list[str]
    tokens: int
    clusters: int
    cluster: str
    failures: list[str]
    passed: bool
    history: list[Past] = field(default_factory=list)
    schema_version: int = 1

    @property
    def undecided(self) -> bool:
        """Whether nothing failed, and a gate cannot be judged."""
        return not self.passed and not self.failures and bool(self.gates) and not any(g.failed for g in self.gates)

    def to_json(self) -> str:
        """The text of comparison.json."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"


def compare(baseline: Side, candidate: Side, gates: Sequence[str] = ()) -> Comparison:
    """Hold `candidate` against `baseline`. With gates they decide; without, a figure that is worse fails. A candidate whose own run failed does not pass.

    Raises:
        DataError: they were measured on different texts, by different protocols, or on different tokens; or a gate is malformed or names a figure that is not there.
    """
    _check_comparable(baseline, candidate)
    references = all(side.evaluation.get("kl_mean") is not None for side in (baseline, candidate))
    rows, figures = text_rows(baseline, candidate, references=references)
    notes = _reference_note(baseline, candidate) if references else ["KL divergence and agreement are not compared: at least one side was evaluated without --against"]
    asked, answered, said = task_rows(baseline, candidate)
    rows += asked
    notes += [*said, *_document_note(candidate), *_calibration_note(baseline, candidate)]
    checks = [check(text, figures | size_figures(baseline, candidate) | answered) for text in gates]
    passed = all(c.passed or c.on == "warn" for c in checks) if checks else all(r.verdict.word != "worse" for r in rows)
    cluster = baseline.evaluation["protocol"].get("cluster")
    return Comparison(
        baseline.path, candidate.path, rows, checks, changes(baseline.whole, candidate.whole), notes, baseline.evaluation["tokens"], len(baseline.clusters),
        cluster if cluster in ("document", "window") else "piece", candidate.failures, passed and not candidate.failures,
    )  # fmt: skip


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


def _reference_note(baseline: Side, candidate: Side) -> list[str]:
    a, b = (math.fsum(s.column("nll_reference")) / sum(s.column("tokens")) for s in (baseline, candidate))
    if abs(a - b) < 1e-4:
        return []
    return [f"the two were measured against different originals (perplexity {exponential(a):.6g} and {exponential(b):.6g}): KL divergence and agreement are each against its own"]


def _document_note(candidate: Side) -> list[str]:
    protocol = candidate.evaluation["protocol"]
    note = "the text is one document, whose windows are taken as independent: the intervals tell of this text, not of others like it; give several documents (.jsonl, one a line)"
    return [note] if isinstance(protocol, dict) and protocol.get("cluster") == "window" else []


def _calibration_note(baseline: Side, candidate: Side) -> list[str]:
    """That another calibration widens what is the same; what is wrong with the candidate's calibration text, where a run has noticed it."""
    wider = "calibrated with different tokens of one text, which alone gives such models: differences matter from a tenth of the KL divergence and of the disagreement on"
    warning = find(candidate.results, ("calibration", "likeness", "warning"))
    return [wider] * recalibrated(baseline, candidate) + [f"calibration of the candidate: {warning}"] * bool(warning)
