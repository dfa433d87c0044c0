"""The report as GitHub-flavoured Markdown: for a pull-request comment, a CI step summary, a terminal."""

from __future__ import annotations

import functools
import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from qforge.report.facts import Facts

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~&])")


def markdown(facts: Facts) -> str:
    """The text of report.md."""
    text: str = _template().render(facts=facts)
    return text


def words(text: str) -> str:
    """Text from elsewhere, so that Markdown shows it and does not obey it."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def cell(text: str) -> str:
    """The same for a table cell; leading blanks (sub-rows) become a visible indent."""
    return ("&nbsp;&nbsp;" if text.startswith("  ") else "") + words(text)


def fence(text: str) -> str:
    """A fence longer than any run of backticks inside of the text."""
    return "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text) or [""]))


@functools.cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("qforge.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {"words": words, "cell": cell, "fence": fence}
    return environment.get_template("report.md.j2")
