"""The report as one HTML page that needs nothing else: no script, no request, plots as inline SVG."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from qforge.report import comparison, curves, sweep
from qforge.report.facts import Facts
from qforge.report.numbers import number, percent
from qforge.report.plots import heat_map, histogram, scatter


def html(facts: Facts) -> str:
    """The text of report.html; all text from elsewhere is escaped."""
    evaluation = facts.results.get("evaluation") or {}
    clusters = evaluation.get("clusters") or []
    text: str = _template("report.html.j2").render(
        facts=facts,
        unit=(evaluation.get("protocol") or {}).get("cluster", "cluster"),
        heat=heat_map(facts.results.get("layers") or []),
        scatter=scatter(clusters),
        histogram=histogram(clusters),
        position=curves.by_position(evaluation),
        tokens=curves.token_histogram(evaluation),
        pairs=curves.pairs(facts.results) if evaluation.get("reference") else [],
        worst=[_worst(w) for w in evaluation.get("worst_tokens") or []],
    )
    return text


def comparison_html(data: Mapping[str, Any]) -> str:
    """The text of comparison.html."""
    head = next(r["candidate"] for r in data["rows"] if r["name"] == "perplexity")
    text: str = _template("comparison.html.j2").render(
        data=data,
        headline=comparison.headline(data),
        header=comparison.HEADER,
        rows=[comparison.row(r) for r in data["rows"]],
        gate_header=comparison.GATES,
        gates=[comparison.gate(g) for g in data["gates"]],
        power=comparison.power(data),
        measured=comparison.measured(data),
        command=comparison.command(data),
        history=curves.history(data["history"], head),
    )
    return text


def sweep_html(data: Mapping[str, Any]) -> str:
    """The text of sweep.html."""
    text: str = _template("sweep.html.j2").render(
        data=data, good=sweep.good(data), headline=sweep.headline(data), header=sweep.HEADER, rows=sweep.rows(data), words=sweep.words_of(data), plot=sweep.pareto(data)
    )
    return text


@functools.cache
def _template(name: str) -> Any:
    """Compiled once a process: compiling takes longer than the rest of a report."""
    loader = PackageLoader("qforge.report")
    return Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=True).get_template(name)


def _worst(w: Mapping[str, Any]) -> dict[str, str]:
    def expected(guesses: list[Mapping[str, Any]]) -> str:
        return ", ".join(f"{_visible(g)} {percent(g['probability'], 1)}" for g in guesses)

    change = f"{percent(w['probability_reference'], 1)} \u2192 {percent(w['probability'], 1)}"
    context = "" if w.get("context") is None else w["context"]
    found = {"kl": number(w["kl"], 2), "context": context, "text": _visible(w), "probability": change}
    return found | {"reference": expected(w["expected_reference"]), "expected": expected(w["expected"])}


def _visible(token: Mapping[str, Any]) -> str:
    """A token's text with blanks that can be seen; its number where the text is not known."""
    text = token.get("text")
    return f"#{token['token']}" if text is None else str(text).replace("\n", "\u21b5").replace(" ", "\u00b7") or "(nothing)"
