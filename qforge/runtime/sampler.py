"""Choose the next token of each sequence. Random numbers depend on (seed, position) alone, so that who else is in the batch does not matter."""

from __future__ import annotations

import numpy as np
import torch

from qforge.runtime.sequence import Draw, SamplingParams


def sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """The token of each draw from its row of fp32 logits `[L, V]`; -1 where the largest is not finite."""
    best = logits.argmax(-1, keepdim=True)
    finite = logits.gather(-1, best).isfinite()[:, 0].tolist()
    return [-1 if not fine else int(best[i]) if d.params.temperature == 0 else draw(logits[i], *d) for i, (d, fine) in enumerate(zip(draws, finite, strict=True))]


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """Sample from one row `[V]`: temperature, then top-k, top-p and min-p (transformers' order), then the inverse of the distribution function at one uniform number."""
    scaled, tokens = (logits.double() / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        scaled = scaled[: params.top_k]
    p = torch.softmax(scaled, 0)
    before = p.cumsum(0) - p
    keep = (before < params.top_p) & (p >= params.min_p * p[0])
    cumulative = p[keep].cumsum(0)
    place = int(torch.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], right=True))
    return int(tokens[: len(p)][keep][min(place, len(cumulative) - 1)])


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that is a function of seed and position (Philox 4x64, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random())
