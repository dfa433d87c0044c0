"""Rows -> the table of all runs, and the ratios of ours to the best of the peers' in each respect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
HEAD = "| run | scheme | bits | KL | 95 % | KL p99 | perplexity | original | top-1 | seconds | process s | MB libraries > before > peak |"
RATIOS = "| ours | beside the peers' | KL | perplexity above the original's | seconds | MB above the libraries |"
RIVALS: dict[str, Callable[[Row], bool]] = {  # whom a method is measured against
    "gptq": lambda row: row["method"].startswith("gptq"),
    "awq": lambda row: row["method"] == "awq",
    "rtn": lambda row: row["tool"] == "simple" or row["method"] == "rtn",
    "signround": lambda row: row["tool"] == "autoround",
}


def main_table(rows: Sequence[Row]) -> str:
    """All runs, the lowest KL divergence first."""
    lines = [_line(row) for row in sorted(rows, key=lambda row: row["kl"])]
    return "\n".join([HEAD, "|---" * HEAD.count("| ") + "|", *lines])


def ratio_table(rows: Sequence[Row]) -> str:
    """Ours over the best of the peers of the same kind (all peers where none is of its kind), respect by respect; below 1 is better."""
    peers = [row for row in rows if row["tool"] != "ours"]
    ours = [row for row in rows if row["tool"] == "ours"]
    if not peers or not ours:
        return ""
    lines = []
    for row in ours:
        kind = row["method"].split("+")[-1]
        rivals = [peer for peer in peers if RIVALS.get(kind, lambda _: True)(peer)]
        group = rivals or peers
        ratios = [_ratio(row, group, figure) for figure in (_kl, _excess, _seconds, _memory)]
        lines.append(f"| {row['name']} {row['scheme']} | {kind if rivals and kind in RIVALS else 'all'} | {' | '.join(ratios)} |")
    return "\n".join([RATIOS, "|---" * RATIOS.count("| ") + "|", *lines])


def floor_table(rows: Sequence[Row], multiplications: float) -> str:
    """Ours that calibrate on the text that all are given, beside the least that GPTQ takes on it, at the rate measured right before and after each run, and beside a pass of that
    text through transformers' model right after it (`floor.py`)."""
    found = [row for row in rows if row.get("multiplications_per_s") and row["method"] != "rtn" and "generated" not in row["name"]]
    lines = [_floor_line(row, multiplications / row["multiplications_per_s"], row.get("forward_seconds")) for row in found]
    head = f"| ours | scheme | fp32 product, GMAC/s | seconds | floor of one pass ({multiplications / 1e12:.2f} TMAC), s | ratio | a forward pass, s | ratio |"
    return "\n".join([head, "|---" * head.count("| ") + "|", *lines]) if lines else ""


def _floor_line(row: Row, least: float, forward: float | None) -> str:
    seconds = row["seconds"]
    passes = "- | -" if forward is None else f"{forward:.1f} | {seconds / forward:.2f}"
    return f"| {row['name']} | {row['scheme']} | {row['multiplications_per_s'] / 1e9:.0f} | {seconds:.1f} | {least:.1f} | {seconds / least:.2f} | {passes} |"


def _line(row: Row) -> str:
    interval = "-" if row["kl_ci95"] is None else f"{row['kl_ci95'][0]:.4f}-{row['kl_ci95'][1]:.4f}"
    return (
        f"| {row['name']} | {row['scheme']} | {row['bits']:.2f} | {row['kl']:.4f} | {interval} | {row['kl_p99']:.3f} | {row['perplexity']:.3f} | {row['original']:.3f} "
        f"| {row['top1']:.3f} | {row['seconds']:.1f} | {row['process_seconds']:.0f} | {row['mb_libraries']} > {row['mb_before']} > {row['mb_peak']} |"
    )


def _ratio(row: Row, peers: Sequence[Row], figure: Callable[[Row], float]) -> str:
    """Ours over the smallest of theirs, and whose that is."""
    best = min(peers, key=figure)
    return f"{figure(row) / figure(best):.2f} x {best['name']}" if figure(best) > 0 else f"- ({best['name']} has none)"


def _kl(row: Row) -> float:
    return float(row["kl"])


def _excess(row: Row) -> float:
    return float(row["perplexity"] / row["original"] - 1)


def _seconds(row: Row) -> float:
    return float(row["seconds"])


def _memory(row: Row) -> float:
    return float(row["mb_peak"] - row["mb_libraries"])
