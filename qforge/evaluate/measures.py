"""What positions tell beyond means: quantiles of the divergence, probability changes, flips, divergence by position."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qforge.evaluate import statistics
from qforge.evaluate.tokens import Tokens
from qforge.types import DeltaP, Flips, Histogram, PositionBin

Floats = NDArray[np.float64]
QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999}
PERCENTILES = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)  # those of llama-perplexity
DECADES = (-6, 2)  # of the histogram, in powers of ten of a nat
BINS = 4  # a decade


def quantiles(tokens: Tokens) -> dict[str, Any]:
    """`kl_median` ... `kl_p999` with their intervals, and `kl_max`."""
    found: dict[str, Any] = {"kl_max": float(tokens.kl.max())}
    for name, share in QUANTILES.items():
        found[name], found[f"{name}_ci95"] = statistics.quantile(tokens.kl, tokens.cluster, tokens.sizes, share)
    return found


def delta_p(tokens: Tokens) -> DeltaP:
    """Change of the true token's probability. llama-perplexity prints the same in percent, over the second half of each window."""
    change = tokens.probability - tokens.probability_reference
    mean, square = tokens.mean(change), tokens.mean(change * change)
    percentiles = dict(zip((f"{p:g}" for p in PERCENTILES), map(float, np.percentile(change, PERCENTILES)), strict=True))
    ends = square.interval and (math.sqrt(max(0.0, square.interval[0])), math.sqrt(square.interval[1]))
    return DeltaP(mean.value, math.sqrt(square.value), {"min": float(change.min()), **percentiles, "max": float(change.max())}, mean.interval, ends)


def flips(tokens: Tokens) -> Flips:
    """How often a right first choice was lost, and how often one was gained (arXiv 2407.09141: equal accuracy hides both)."""
    lost, gained = (tokens.share(a & ~b) for a, b in ((tokens.right_reference, tokens.right), (tokens.right, tokens.right_reference)))
    return Flips(float(tokens.right_reference.mean()), float(tokens.right.mean()), lost.value, gained.value, lost.share, gained.share)


def by_position(tokens: Tokens) -> list[PositionBin]:
    """Mean divergence in half octaves of the position in the window."""
    last = int(tokens.position.max())
    edges = sorted({round(2 ** (k / 2)) for k in range(2 * last.bit_length() + 1)} | {1})
    found = []
    for start, stop in itertools.pairwise(edges):
        inside = (tokens.position >= start) & (tokens.position < stop)
        if count := int(inside.sum()):
            sizes = np.bincount(tokens.cluster[inside], minlength=len(tokens.sizes)).astype(np.float64)
            sums = np.bincount(tokens.cluster[inside], weights=tokens.kl[inside], minlength=len(tokens.sizes))
            value, error = statistics.mean_and_error(sums[sizes > 0], sizes[sizes > 0])
            found.append(PositionBin(start, min(stop, last + 1), count, value, error if math.isfinite(error) else None))
    return found


def histogram(kl: Floats) -> Histogram:
    """Counts in quarters of a decade from a millionth of a nat to 100 nats."""
    edges = 10.0 ** (np.arange(DECADES[0] * BINS, DECADES[1] * BINS + 1) / BINS)
    counts = np.histogram(np.clip(kl, edges[0], edges[-1]), edges)[0]
    return Histogram([float(f"{e:.6g}") for e in edges], [int(c) for c in counts])
