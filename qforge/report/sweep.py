"""A sweep in words and as a plot, from the JSON object that `qforge quantize` makes of a recipe with variants: text for a terminal, Markdown, geometry of the Pareto plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qforge.report.markdown import cell, words
from qforge.report.numbers import MISSING, interval, number, percent, size
from qforge.report.plots import Tick, round_values

WIDTH, HEIGHT = 520.0, 300.0
LETTER, TALL = 11.0, 18.0  # of a label on a phone, where it is largest
HEADER = ("#", "variant", "gates", "front", "size", "of 16 bits", "bits per weight", "KL divergence", "95 % interval", "against the best", "perplexity ratio", "top-1", "tokens/s")
Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pareto:
    """Size across (logarithmic), divergence up (logarithmic). Points are (x, y, on the front, number, title, where the number stands); `front`: the staircase along those on it."""

    width: float
    height: float
    points: list[tuple[float, float, bool, str, str, tuple[float, float]]]
    front: str
    across: list[Tick]
    up: list[Tick]


def good(data: Data) -> bool:
    """Whether every variant was computed and its gates hold."""
    return all(v["error"] is None and v["passed"] for v in data["variants"])


def headline(data: Data) -> str:
    """The outcome, first of all."""
    variants = data["variants"]
    broken = [v["name"] for v in variants if v["error"]]
    failed = [v["name"] for v in variants if v["passed"] is False]
    front = [v["name"] for v in _by_size(variants) if v["front"]]
    told = [f"on the front of size, divergence and speed: {', '.join(front)}"] if front else []
    told += [f"gates fail in {', '.join(failed)}"] if failed else []
    told += [f"not computed: {', '.join(broken)}"] if broken else []
    return f"{'DONE' if good(data) else 'FAILED'}: {len(variants)} variants; {'; '.join(told)}"


def words_of(data: Data) -> str:
    """What was measured, and what the columns say."""
    reference = data["reference"]
    told = f"Original: {data['model']['source']}" + (f", {size(data['model']['bytes_at_16_bits'])} at 16 bits" if "bytes_at_16_bits" in data["model"] else "")
    told += "." if reference is None else f", perplexity {number(reference['perplexity'])} over {data['tokens']:,} tokens in {data['clusters']:,} clusters."
    told += " Front: no other variant is as small, as near to the original (as far as this text shows) and as fast, and better in one of them."
    return f"{told} Against the best: the divergence, paired with that of the variant with the least one."


def rows(data: Data) -> list[tuple[str, ...]]:
    """A variant's cells, as HEADER."""
    return [_row(i + 1, v) for i, v in enumerate(data["variants"])]


def _row(place: int, v: Data) -> tuple[str, ...]:
    if v["error"]:
        return (str(place), v["name"], f"NOT COMPUTED: {v['error']}", "", *[MISSING] * 9)
    gates = "none" if not v["num_gates"] else "passed" if v["passed"] else f"FAILED: {', '.join(v['failed_gates'])}"
    speed = MISSING if v["tokens_per_second"] is None else f"{v['tokens_per_second']:.1f}"
    return (
        str(place), v["name"], gates, "yes" if v["front"] else "", size(v["size_bytes"]), percent(v["size_ratio"], 1), number(v["bits_per_weight"], 3),
        number(v["kl_mean"]), interval(v["kl_mean_ci95"]), str(v["against_best"]), number(v["perplexity_ratio"]), percent(v["top1_agreement"], 1), speed,
    )  # fmt: skip


def text(data: Data) -> list[str]:
    """Lines for a terminal: the few columns that fit."""
    kept = [HEADER.index(name) for name in ("#", "variant", "front", "size", "bits per weight", "perplexity ratio", "KL divergence", "against the best", "tokens/s", "gates")]
    table = [tuple(row[i] for i in kept) for row in (HEADER, *rows(data))]
    widths = [max(len(row[i]) for row in table) for i in range(len(kept))]
    return [headline(data), "", *("  ".join(c.ljust(width) for c, width in zip(row, widths, strict=True)).rstrip() for row in table)]


def markdown(data: Data) -> str:
    """The text of sweep.md."""
    table = [HEADER, *rows(data)]
    lines = [f"# qforge sweep: {words(data['recipe'])}", "", f"**{words(headline(data))}**", "", words(words_of(data)), ""]
    lines += [f"| {' | '.join(map(cell, table[0]))} |", f"|{' --- |' * len(HEADER)}", *(f"| {' | '.join(map(cell, r))} |" for r in table[1:])]
    lines += ["", "What each variant changes:", ""]
    lines += [f"- {words(v['name'])}: {words(', '.join(f'{k} = {x}' for k, x in v['changes'].items()))}; report in {words(v['path'])}" for v in data["variants"]]
    return "\n".join(lines) + "\n"


def pareto(data: Data) -> Pareto | None:
    """None where no variant was measured."""
    known = [(i + 1, v) for i, v in enumerate(data["variants"]) if v["kl_mean"] is not None]
    if not known:
        return None
    x = _scale([v["size_bytes"] for _, v in known], WIDTH)
    y = _scale([max(v["kl_mean"], 1e-9) for _, v in known], HEIGHT)

    def at(v: Data) -> tuple[float, float]:
        return x(v["size_bytes"]), HEIGHT - y(max(v["kl_mean"], 1e-9))

    labels = _labels([at(v) for _, v in known], [str(n) for n, _ in known])
    titles = [f"{v['name']}: {size(v['size_bytes'])}, KL {number(v['kl_mean'])}" for _, v in known]
    points = [(*at(v), bool(v["front"]), str(n), title, label) for (n, v), title, label in zip(known, titles, labels, strict=True)]
    steps: list[tuple[float, float]] = []
    for px, py in (at(v) for v in _by_size([v for _, v in known]) if v["front"]):
        if not steps or py > steps[-1][1]:
            steps += [(px, steps[-1][1]), (px, py)] if steps else [(px, py)]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in steps)
    across = _apart([Tick(x(v), size(v).replace(".0 ", " ")) for v in _marks([v["size_bytes"] for _, v in known])])
    up = [Tick(HEIGHT - y(v), f"{v:g}") for v in _marks([max(v["kl_mean"], 1e-9) for _, v in known])]
    return Pareto(WIDTH, HEIGHT, points, line, across, up)


def _by_size(variants: Sequence[Data]) -> list[Data]:
    return sorted((v for v in variants if v["size_bytes"] is not None), key=lambda v: (v["size_bytes"], v["kl_mean"]))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis, as logarithms, with a margin on both sides."""
    low, high = math.log(min(values)), math.log(max(values))
    margin = max(0.08 * (high - low), 0.02)
    return low - margin, high + margin


def _scale(values: Sequence[float], length: float) -> Any:
    low, high = _ends(values)
    return lambda value: (math.log(value) - low) / (high - low) * length


def _marks(values: Sequence[float]) -> list[float]:
    low, high = _ends(values)
    return round_values(math.exp(low), math.exp(min(high, 700.0)))


def _apart(ticks: list[Tick]) -> list[Tick]:
    """Without those whose text would touch the one before."""
    kept: list[Tick] = []
    for tick in ticks:
        if not kept or tick.at - kept[-1].at > 1.1 * LETTER * len(tick.text):
            kept.append(tick)
    return kept


def _labels(points: list[tuple[float, float]], texts: list[str]) -> list[tuple[float, float]]:
    """Where the left lower corner of each text stands: beside its point, where it touches no other text and no other point; else as far up as it must."""
    placed: list[tuple[float, float, float, float]] = []
    found = []
    for i, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
        wide = LETTER * len(text)
        beside = [(x + dx, y + dy) for dy in (-7.0, 20.0) for dx in (9.0, -9.0 - wide)]
        above = [(x + 9.0, y - 7.0 - TALL * k) for k in range(1, len(points) + 1)]
        others = [(px - 5, py - 5, px + 5, py + 5) for j, (px, py) in enumerate(points) if j != i]
        free = (at for at in (*beside, *above) if not any(_touch((at[0], at[1] - TALL, at[0] + wide, at[1]), box) for box in (*others, *placed)))
        left, low = next(free, beside[0])
        placed.append((left, low - TALL, left + wide, low))
        found.append((left, low))
    return found


def _touch(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
