"""Geometry of curves and bars: numbers of results.json -> coordinates that the page's templates draw as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qforge.report.numbers import number, size
from qforge.report.plots import Tick

WIDTH, HEIGHT = 380.0, 200.0
Data = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points joined by a line. `points`: (x, y, title); `band`: the outline of the interval around it as an SVG points list, empty without one."""

    width: float
    height: float
    points: list[tuple[float, float, str]]
    band: str
    across: list[Tick]
    up: list[Tick]

    @property
    def line(self) -> str:
        """The points as SVG wants them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in self.points)


@dataclass(frozen=True, slots=True)
class Bars:
    """Columns: (x, y, width, height, title)."""

    width: float
    height: float
    bars: list[tuple[float, float, float, float, str]]
    across: list[Tick]


def by_position(evaluation: Data) -> Curve | None:
    """KL divergence by the number of tokens before, logarithmic across; the band is the 95 % interval."""
    bins = evaluation.get("kl_by_position") or []
    if len(bins) < 3:
        return None
    across = [(math.log2(b["start"]) + math.log2(b["stop"])) / 2 for b in bins]
    low, high = math.log2(bins[0]["start"]), math.log2(bins[-1]["stop"])
    ends = [(max(0.0, b["kl_mean"] - 1.96 * (b["error"] or 0.0)), b["kl_mean"] + 1.96 * (b["error"] or 0.0)) for b in bins]
    top = max(max(e for _, e in ends), 1e-12)
    xs = [(x - low) / (high - low) * WIDTH for x in across]
    titles = [f"{b['start']} to {b['stop'] - 1} tokens before: {number(b['kl_mean'])} ({b['tokens']:,} tokens)" for b in bins]
    points = [(x, _up(b["kl_mean"], top), t) for x, b, t in zip(xs, bins, titles, strict=True)]
    outline = [*((x, _up(e[1], top)) for x, e in zip(xs, ends, strict=True)), *((x, _up(e[0], top)) for x, e in reversed(list(zip(xs, ends, strict=True))))]
    powers = range(math.ceil(low), math.floor(high) + 1)
    step = max(1, math.ceil(len(powers) / 8))
    ticks = [Tick((k - low) / (high - low) * WIDTH, f"{2**k:g}") for k in powers[::step]]
    return Curve(WIDTH, HEIGHT, points, " ".join(f"{x:.1f},{y:.1f}" for x, y in outline), ticks, _levels(top))


def token_histogram(evaluation: Data) -> Bars | None:
    """How many tokens have which KL divergence, logarithmic across."""
    found = evaluation.get("kl_histogram")
    if not found:
        return None
    edges, counts = found["edges"], found["counts"]
    filled = [i for i, n in enumerate(counts) if n]
    if not filled:
        return None
    first, last = filled[0], filled[-1] + 1
    step = WIDTH / (last - first)
    top = max(counts)
    bars = [
        ((i - first) * step + 0.5, HEIGHT * (1 - counts[i] / top), step - 1, HEIGHT * counts[i] / top, f"{edges[i]:.2g} to {edges[i + 1]:.2g} nats: {counts[i]:,} tokens")
        for i in filled
    ]
    whole = [i for i in range(first, last + 1) if abs(math.log10(edges[i]) - round(math.log10(edges[i]))) < 1e-6]
    return Bars(WIDTH, HEIGHT, bars, [Tick((i - first) * step, f"{edges[i]:g}") for i in whole[:: max(1, math.ceil(len(whole) / 6))]])


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of the original and of the quantized model: both values as text, their lengths as shares of the larger one."""

    name: str
    original: str
    quantized: str
    original_share: float
    quantized_share: float


def pairs(results: Data) -> list[Pair]:
    """Perplexity and size of both models, where both are known."""
    evaluation, artifact = results.get("evaluation") or {}, results.get("artifact") or {}
    rows = []
    if evaluation.get("reference"):
        a, b = evaluation["reference"]["perplexity"], evaluation["candidate"]["perplexity"]
        rows.append(("perplexity (less is better)", a, b, number(a), number(b)))
    if artifact.get("original_bytes_at_16_bits") and artifact.get("weights_bytes"):
        a, b = artifact["original_bytes_at_16_bits"], artifact["weights_bytes"]
        rows.append(("size of the weights", a, b, size(a), size(b)))
    return [Pair(name, told, now, a / max(a, b), b / max(a, b)) for name, a, b, told, now in rows]


def history(past: Sequence[Data], now: float) -> Curve | None:
    """Perplexity of past runs, oldest first, and of the candidate as the last point."""
    if len(past) < 2:
        return None
    values = [(p["commit"][:10], float(p["perplexity"])) for p in past] + [("candidate", now)]
    low, high = min(v for _, v in values), max(v for _, v in values)
    spread = (high - low) or 0.01 * high
    low, high = low - 0.1 * spread, high + 0.1 * spread
    step = WIDTH / (len(values) - 1)
    points = [(i * step, HEIGHT * (1 - (v - low) / (high - low)), f"{name}: {v:.4f}") for i, (name, v) in enumerate(values)]
    up = [Tick(HEIGHT * (1 - share), f"{low + share * (high - low):.4g}") for share in (0.0, 0.5, 1.0)]
    return Curve(WIDTH, HEIGHT, points, "", [Tick(0, values[0][0]), Tick(WIDTH, "candidate")], up)


def _up(value: float, top: float) -> float:
    return HEIGHT * (1 - value / top)


def _levels(top: float) -> list[Tick]:
    return [Tick(HEIGHT * (1 - i / 4), f"{top * i / 4:.2g}") for i in range(5)]
