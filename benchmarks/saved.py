"""What the tables of all benchmarks share: the command and the machine that they state, a ratio over rounds in words, and the two files that a table is saved as."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qforge.ops.native_module import instruction_sets
from qforge.stages.outcome import environment

RESULTS = Path(__file__).parent / "results"


def told(name: str) -> str:
    """The command, files by name: without this machine's folders."""
    limits = [f"{name}={os.environ[name]}" for name in ("QFORGE_ISA", "ONEDNN_MAX_CPU_ISA") if name in os.environ]
    return " ".join([*limits, f"python benchmarks/{name}.py", *map(_bare, sys.argv[1:])])


def _bare(argument: str) -> str:
    flag, is_one, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return flag + is_one + (Path(value).name if "/" in value else value)


def machine(**more: Any) -> dict[str, Any]:
    """`environment` of a saved result: the day (UTC), versions, processor, its fastest instruction set, and what else was measured of it."""
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"date": day} | environment() | {"instruction_set": next(iter(instruction_sets()), None)} | more


def place(environment: dict[str, Any]) -> str:
    """Day and machine as a table states them."""
    return ", ".join(str(environment[key]) for key in ("date", "cpu", "instruction_set") if environment.get(key))


def rounds_said(count: int) -> str:
    """How a table's figures come from its rounds."""
    return "One round" if count == 1 else f"Medians of {count} rounds"


def spread(ratios: Iterable[float]) -> str:
    """The median, and what the rounds spread over where there are several."""
    found = sorted(ratios)
    middle = f"{statistics.median(found):.2f}"
    return middle if len(found) == 1 else f"{middle} ({found[0]:.2f}-{found[-1]:.2f})"


def save(benchmark: str, name: str, content: dict[str, Any], text: str) -> None:
    """Write benchmarks/results/BENCHMARK-NAME.json and .md."""
    (RESULTS / f"{benchmark}-{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"{benchmark}-{name}.md").write_text(text + "\n")
