"""How near another engine's next-token distributions are to ours: prompts, our log-probabilities, and the figures that compare them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from qforge.engines.base import Scorer

SHORTEST, LONGEST = 16, 128
EXACT_KL = 1e-3  # nats; an engine that computes in fp32 stays below


def seeded_prompts(windows: Sequence[Sequence[int]], count: int = 64, seed: int = 0) -> list[list[int]]:
    """Prefixes of evaluation windows, 16 to 128 tokens long where the windows are, no two alike: positions at which engines are compared."""
    choices = [(i, n) for i, w in enumerate(windows) for n in range(min(SHORTEST, len(w)), min(LONGEST, len(w)) + 1)]
    chosen = random.Random(seed).sample(choices, min(count, len(choices)))
    return [list(windows[i][:n]) for i, n in sorted(chosen)]


def next_token_logprobs(scorer: Scorer, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """fp32 log-probabilities `[len(prompts), V]` of the token after each prompt."""
    windows = [[*p, 0] for p in prompts]  # scorers leave out a window's last position
    pieces = iter(scorer.score(windows))
    rows = []
    for window in windows:
        left = len(window) - 1
        while left > 0:
            piece = next(pieces)
            left -= len(piece)
        rows.append(torch.log_softmax(piece[-1].float(), -1))
    return torch.stack(rows)


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float, float]:
    """Mean KL divergence (nats) of `theirs` from `ours`, the share of rows that rank the same token first, and the largest difference; log-probabilities `[N, V]`."""
    p, q = torch.log_softmax(ours.double(), -1), torch.log_softmax(theirs.double(), -1)  # fp32 sums over a vocabulary are off by 1e-6
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    return max(kl, 0.0), (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(), (ours - theirs).abs().amax().item()
