"""The report as one HTML page that needs nothing else: no script, no request, plots as inline SVG."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from qforge.report.facts import Facts
from qforge.report.plots import heat_map, histogram, scatter


def html(facts: Facts) -> str:
    """The text of report.html; all text from elsewhere is escaped."""
    environment = Environment(loader=PackageLoader("qforge.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=True)
    evaluation = facts.results.get("evaluation") or {}
    clusters = evaluation.get("clusters") or []
    return environment.get_template("report.html.j2").render(
        facts=facts,
        unit=(evaluation.get("protocol") or {}).get("cluster", "cluster"),
        heat=heat_map(facts.results.get("layers") or []),
        scatter=scatter(clusters),
        histogram=histogram(clusters),
    )
