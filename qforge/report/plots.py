"""Geometry of the plots: numbers of results.json -> coordinates that the page's template draws as SVG. No drawing here, no text from elsewhere without a name for it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 600
_MOST_NATS = 700.0  # e to that is still a number
_NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: its coordinate and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Relative error of every layer: a column for each block, a row for each kind of linear. Cells are (x, y, strength 0..1, title)."""

    width: float
    height: float
    left: float
    cell: tuple[float, float]
    cells: list[tuple[float, float, float, str]]
    rows: list[Tick]
    columns: list[Tick]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Scatter:
    """Perplexity of each document or window, original across, quantized up, both axes logarithmic with the same range."""

    size: float
    left: float
    points: list[tuple[float, float, str]]
    ticks: list[Tick]
    shown: int
    total: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many documents or windows have which KL divergence. Bars are (x, y, width, height, title)."""

    width: float
    height: float
    bars: list[tuple[float, float, float, float, str]]
    ticks: list[Tick]
    mean: float


def heat_map(layers: Sequence[Mapping[str, Any]]) -> HeatMap | None:
    """None when no layer's error is known, or names hold no block number."""
    found = [(m[3], int(m[2]), float(x["relative_error"]), x) for x in layers if x.get("relative_error") is not None and (m := _NUMBERED.match(x["name"]))]
    if not found:
        return None
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    blocks = sorted({block for _, block, *_ in found})
    low, high = min(e for _, _, e, _ in found), max(e for _, _, e, _ in found)
    left, width = 150.0, 560.0 / len(blocks)
    height = 22.0
    cells = [
        (
            left + blocks.index(block) * width,
            kinds.index(kind) * height,
            (error - low) / (high - low) if high > low else 0.5,
            f"{x['name']}: {error:.4f} ({x.get('scheme') or 'as it was'})",
        )
        for kind, block, error, x in found
    ]
    rows = [Tick((i + 0.5) * height, kind) for i, kind in enumerate(kinds)]
    step = max(1, math.ceil(len(blocks) / 12))
    columns = [Tick(left + (i + 0.5) * width, str(block)) for i, block in enumerate(blocks) if i % step == 0]
    return HeatMap(left + 560, len(kinds) * height + 20, left, (width, height), cells, rows, columns, low, high)


def scatter(clusters: Sequence[Mapping[str, Any]]) -> Scatter | None:
    """None without a reference."""
    pairs: list[tuple[float, float]] = [(c["nll_reference"] / c["tokens"], c["nll_candidate"] / c["tokens"]) for c in clusters if c.get("nll_reference") is not None]
    if not pairs:
        return None
    low, high = min(min(p) for p in pairs), max(max(p) for p in pairs)
    margin = max(0.05 * (high - low), 0.02)
    low, high, left, side = low - margin, high + margin, 60.0, 300.0

    def at(nll: float) -> float:
        return (nll - low) / (high - low) * side

    every = math.ceil(len(pairs) / MOST_POINTS)
    points = [(left + at(a), side - at(b), f"original {_perplexity(a)}, quantized {_perplexity(b)}") for a, b in pairs[::every]]
    ends = (math.exp(low), math.exp(min(high, _MOST_NATS))) if low < _MOST_NATS else None  # beyond that an axis has no numbers
    ticks = [] if ends is None else [Tick(at(math.log(value)), f"{value:g}") for value in round_values(*ends)]
    return Scatter(side, left, points, ticks, len(points), len(pairs))


def _perplexity(nll: float) -> str:
    value = math.exp(min(nll, _MOST_NATS))
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"


def histogram(clusters: Sequence[Mapping[str, Any]], bins: int = 24) -> Histogram | None:
    """None without a reference."""
    values = [max(0.0, c["kl_sum"] / c["tokens"]) for c in clusters if c.get("kl_sum") is not None]
    top = max(values, default=0.0)
    if top <= 0:
        return None
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value / top * bins))] += 1
    width, height = 330.0, 290.0
    step = width / bins
    bars = [
        (i * step + 1, height - height * n / max(counts), step - 2, height * n / max(counts), f"{i * top / bins:.3g} to {(i + 1) * top / bins:.3g}: {n}")
        for i, n in enumerate(counts)
        if n
    ]
    mean = sum(c["kl_sum"] for c in clusters if c.get("kl_sum") is not None) / sum(c["tokens"] for c in clusters if c.get("kl_sum") is not None)
    return Histogram(width, height, bars, [Tick(width * i / 4, f"{top * i / 4:.2g}") for i in range(5)], mean / top * width)


def round_values(low: float, high: float) -> list[float]:
    """A few round numbers inside of a range, for a logarithmic axis; evenly spaced ones when the range is narrow."""
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for mantissas in ((1,), (1, 2, 5)):
        inside = [v for e in decades for m in mantissas if low <= (v := float(f"{m}e{e}")) <= high]
        if len(inside) >= 3:
            return inside[:: math.ceil(len(inside) / 7)]
    least = math.floor(math.log10(high - low)) - 1
    step = next(v for e in range(least, least + 3) for m in (1, 2, 5) if (high - low) / (v := float(f"{m}e{e}")) <= 6)
    return [float(f"{i * step:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
