"""results.json -> report.md, report.html, junit.xml, each written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from qforge.report import comparison, sweep
from qforge.report.facts import gather
from qforge.report.html import comparison_html, html, sweep_html
from qforge.report.junit import junit
from qforge.report.markdown import markdown

FORMATS = ("json", "markdown", "html", "junit")
_FILES = {"markdown": ("report.md", markdown), "html": ("report.html", html), "junit": ("junit.xml", junit)}


def write(results_path: Path, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the asked reports to `folder` and return their paths; `json` stands for results.json itself, which is there already.

    Raises:
        ValueError: an unknown format.
    """
    if unknown := [f for f in formats if f not in FORMATS]:
        raise ValueError(f"unknown report format {unknown[0]!r}; allowed are {', '.join(FORMATS)}")
    facts = gather(json.loads(results_path.read_text(encoding="utf-8")))
    written = []
    for name, make in (_FILES[f] for f in formats if f in _FILES):
        _replace(folder / name, make(facts))
        written.append(folder / name)
    return written


def write_comparison(written: str, folder: Path) -> list[Path]:
    """Write a comparison, the text of its JSON object, as comparison.json, comparison.md, comparison.html and junit.xml; return their paths."""
    data = json.loads(written)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"comparison.json": written, "comparison.md": comparison.markdown(data), "comparison.html": comparison_html(data), "junit.xml": comparison.junit(data)}
    for name, text in texts.items():
        _replace(folder / name, text)
    return [folder / name for name in texts]


def write_sweep(written: str, folder: Path) -> list[Path]:
    """Write a sweep, the text of its JSON object, as sweep.md and sweep.html; return their paths."""
    data = json.loads(written)
    texts = {"sweep.md": sweep.markdown(data), "sweep.html": sweep_html(data)}
    for name, text in texts.items():
        _replace(folder / name, text)
    return [folder / name for name in texts]


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
