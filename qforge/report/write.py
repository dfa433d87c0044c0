"""results.json -> report.md, report.html, junit.xml; a comparison's and a sweep's files. What belongs together is written as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from qforge.files import write_texts
from qforge.report import comparison, sweep
from qforge.report.facts import gather
from qforge.report.html import comparison_html, html, sweep_html
from qforge.report.junit import junit
from qforge.report.markdown import markdown

FORMATS = ("json", "markdown", "html", "junit")
_FILES = {"markdown": ("report.md", markdown), "html": ("report.html", html), "junit": ("junit.xml", junit)}


def write(written: str, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write results, the text of their JSON object, as results.json, and the asked reports beside it; return the reports' paths. `json` stands for results.json itself.

    Raises:
        ValueError: an unknown format.
        OutputError: a file cannot be written; none is there then that was not there before.
    """
    if unknown := [f for f in formats if f not in FORMATS]:
        raise ValueError(f"unknown report format {unknown[0]!r}; allowed are {', '.join(FORMATS)}")
    facts = gather(json.loads(written))
    reports = {name: make(facts) for name, make in (_FILES[f] for f in formats if f in _FILES)}
    write_texts(folder, {**reports, "results.json": written})
    return [folder / name for name in reports]


def write_comparison(written: str, folder: Path) -> list[Path]:
    """Write a comparison, the text of its JSON object, as comparison.md, comparison.html, junit.xml and comparison.json; return their paths.

    Raises:
        OutputError: a file cannot be written; none is there then that was not there before.
    """
    data = json.loads(written)
    texts = {"comparison.md": comparison.markdown(data), "comparison.html": comparison_html(data), "junit.xml": comparison.junit(data), "comparison.json": written}
    write_texts(folder, texts)
    return [folder / name for name in texts]


def write_sweep(written: str, folder: Path) -> list[Path]:
    """Write a sweep, the text of its JSON object, as sweep.md, sweep.html and sweep.json; return their paths.

    Raises:
        OutputError: a file cannot be written; none is there then that was not there before.
    """
    data = json.loads(written)
    texts = {"sweep.md": sweep.markdown(data), "sweep.html": sweep_html(data), "sweep.json": written}
    write_texts(folder, texts)
    return [folder / name for name in texts]
