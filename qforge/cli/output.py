"""What the verbs print: short tables for people, JSON files for programs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from qforge.plan import Plan
    from qforge.recipe import Recipe
    from qforge.stages.estimates import Estimate
    from qforge.types import Evaluation, ExportResult, Results


def write_json(file: str, text: str) -> None:
    """Write JSON to a file, or to stdout for `-`."""
    if file == "-":
        sys.stdout.write(text)
        return
    from qforge.files import write_text

    write_text(Path(file), text)


def table(rows: Iterable[Sequence[str]], *, to_stderr: bool = False, header: Sequence[str] | None = None) -> None:
    """Print rows; the first column is a label."""
    console = Console(stderr=to_stderr, width=None if sys.stdout.isatty() else 140)
    shown = Table(show_header=header is not None, box=None, pad_edge=False)
    columns = [list(r) for r in rows]
    count = max(map(len, columns), default=0)
    for i in range(count):
        shown.add_column(header[i] if header is not None else "", overflow="fold", no_wrap=i + 1 < count)
    for row in columns:
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown, highlight=False)


def print_plan(recipe: Recipe, plan: Plan, estimate: Estimate) -> None:
    """What a run would do: a line for each kind of layer and scheme, then size, memory, time."""
    kinds = Counter((_kind(p.name), str(p.scheme) if p.scheme else f"as it is ({p.reason})", f"{p.out_features} x {p.in_features}") for p in plan.layers)
    table(((kind, shape, str(count), scheme) for (kind, scheme, shape), count in kinds.items()), header=("linear layers", "out x in", "count", "scheme"))
    click.echo()
    mib = 1 << 20
    rows = [
        ("method", " + ".join(recipe.quantize.method)),
        ("parameters", f"{plan.parameters:,}"),
        ("artifact", f"{plan.size_bytes / 1e6:.1f} MB, {plan.size_ratio:.1%} of the 16-bit model"),
        ("bits per weight", f"{plan.bits_per_weight:.3f} in the quantized layers"),
        ("peak memory", f"about {sum(estimate.peak_bytes.values()) / mib:,.0f} MiB, to {estimate.peak_stage}"),
        *((f"  {name}", f"{size / mib:,.0f} MiB") for name, size in estimate.peak_bytes.items() if size),
        ("time", "about " + ", ".join(f"{seconds:,.0f} s to {name}" for name, seconds in estimate.seconds.items())),
        ("exports", ", ".join(e.format for e in recipe.export) or "none"),
        ("gates", ", ".join(f"{name} {g.limit}" for name, g in recipe.gates.items()) or "none"),
        *(("note", note) for note in plan.notes),
    ]
    table(rows)


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def print_evaluation(evaluation: Evaluation, *, to_stderr: bool = False) -> None:
    """Perplexity, and what there is beside a reference."""
    from qforge.report import numbers, quality

    found = quality.rows(asdict(evaluation), adapters=False)
    rows = [(label, value if ends == numbers.MISSING else f"{value} ({ends})") for label, value, ends in found]
    rows.append(("measured", quality.described(asdict(evaluation))))
    rows.append(("protocol", ", ".join(f"{k} {v}" for k, v in evaluation.protocol.items() if isinstance(v, int | float | str | bool))))
    table(rows, to_stderr=to_stderr)


def print_export(result: ExportResult) -> None:
    """Where it is, how large, and who executed it."""
    rounded = [v.rounded for v in result.verified_by if v.rounded]
    rows = [
        ("format", result.format),
        ("path", str(result.path)),
        ("size", f"{(result.size_bytes or 0) / 1e6:.1f} MB"),
        ("lossless", {True: "yes: equal codes, scales and fp32 values", False: ": ".join(["no", *rounded]), None: "not compared"}[result.lossless]),
    ]
    for v in result.verified_by:
        close = f"KL {v.kl_mean:.2e}, top-1 {v.top1_agreement:.3f} over {v.positions} positions" if v.kl_mean is not None and v.top1_agreement is not None else ""
        close += "" if v.near else f" (AND {v.kl_bound:g} IS THE BOUND IN FP32)"
        equal = {True: "weights equal bit for bit", False: "WEIGHTS DIFFER", None: ""}[v.weights_equal]
        text = {True: "tokens and chat template equal", False: "TEXT IS READ OTHERWISE", None: ""}[v.text_equal]
        rows.append((f"{v.engine} {v.version}", ", ".join(t for t in (equal, text, close, v.note or "") if t)))
    if result.skipped_because:
        rows.append(("skipped", result.skipped_because))
    table(rows)


def print_results(results: Results, out: Path) -> None:
    """The closing table of a run."""
    from qforge.report.summary import summary

    table(summary(results))
    click.echo(f"report: {out / 'report.md'}" if (out / "report.md").exists() else f"results: {out / 'results.json'}")
