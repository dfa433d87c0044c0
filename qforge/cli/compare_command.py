"""`qforge compare`: hold one result against another; exit 1 where it is worse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qforge.evaluate.compare import Comparison, GateCheck, Row

_TITLES = {"perplexity": "perplexity", "kl_mean": "KL divergence", "top1_agreement": "top-1 agreement"}


@click.command("compare")
@click.argument("baseline", type=click.Path(path_type=Path), metavar="BASELINE.json")
@click.argument("candidate", type=click.Path(path_type=Path), metavar="CANDIDATE.json")
@click.option("--gate", "gates", multiple=True, metavar="EXPR", help="A limit such as 'perplexity_ratio <= 1.02' (candidate / baseline). May be given several times.")
def command(baseline: Path, candidate: Path, gates: tuple[str, ...]) -> int:
    """Hold CANDIDATE against BASELINE, each a results.json or what `eval --json` wrote, measured on the same text.

    Differences are paired by document and have 95 % intervals. Without --gate the exit code is 1 when perplexity, KL divergence or
    agreement is significantly worse. With --gate only the gates decide: one fails when the whole interval is beyond its limit. Figures:
    perplexity_ratio (candidate / baseline), kl_mean_change and top1_agreement_change (candidate - baseline), and the candidate's own
    perplexity, kl_mean, top1_agreement.
    """
    from qforge.evaluate.compare import compare, read

    result = compare(read(baseline), read(candidate), gates)
    click.echo("\n".join(_lines(result, baseline, candidate)))
    return 0 if result.passed else 1


def _lines(result: Comparison, baseline: Path, candidate: Path) -> list[str]:
    lines = [_headline(result), "", f"baseline   {baseline}", f"candidate  {candidate}", f"text       {result.tokens:,} tokens in {result.clusters:,} clusters, paired", ""]
    lines += _table([("", "baseline", "candidate", "change", "95 % interval", "margin", "verdict"), *map(_cells, result.rows)])
    if result.gates:
        lines += ["", *_table([("gate", "limit", "value", "95 % interval", "verdict"), *map(_gate_cells, result.gates)])]
    if result.changed:
        lines += ["", "changed besides:", *(f"  {line}" for line in result.changed)]
    return lines + [f"note: {note}" for note in result.notes]


def _headline(result: Comparison) -> str:
    if result.gates:
        failed = [g.name for g in result.gates if not g.passed]
        return f"FAILED: {', '.join(failed)} beyond the limit" if failed else f"PASSED: all {len(result.gates)} gates hold"
    worse = [_TITLES[r.name] for r in result.rows if r.verdict.word == "worse"]
    if worse:
        return f"FAILED: significantly worse in {', '.join(worse)}"
    words = {r.verdict.word for r in result.rows}
    if words == {"same"}:
        return "PASSED: the same, as far as this text can show"
    if "not enough data" in words:
        return "PASSED, but this text is too short to tell"
    return "PASSED: better"


def _cells(row: Row) -> tuple[str, ...]:
    if row.kind == "ratio":
        interval = "none" if row.interval is None else f"{row.interval[0] - 1:+.2%} .. {row.interval[1] - 1:+.2%}"
        return _TITLES[row.name], f"{row.baseline:.4f}", f"{row.candidate:.4f}", f"{row.change - 1:+.2%}", interval, f"{row.margin:.2%}", str(row.verdict)
    digits = 4 if row.name == "top1_agreement" else 6
    interval = "none" if row.interval is None else f"{row.interval[0]:+.{digits}f} .. {row.interval[1]:+.{digits}f}"
    return _TITLES[row.name], f"{row.baseline:.{digits}f}", f"{row.candidate:.{digits}f}", f"{row.change:+.{digits}f}", interval, f"{row.margin:.{digits}f}", str(row.verdict)


def _gate_cells(gate: GateCheck) -> tuple[str, ...]:
    interval = "none" if gate.interval is None else f"{gate.interval[0]:.6g} .. {gate.interval[1]:.6g}"
    told = ("passed" if gate.passed else "FAILED") + ("" if gate.sure else " (no interval)" if gate.interval is None else " (the interval holds the limit: not sure)")
    return gate.name, gate.limit, f"{gate.value:.6g}", interval, told


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
