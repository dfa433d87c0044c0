"""Evaluations made up: with clusters, tasks, and windows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from qforge.types import Cluster, Evaluation


def evaluation(*, clusters: int = 300, seed: int = 0, nll: float = 0.0, kl: float = 0.0, agree: float = 0.0, noise: float = 0.01, alone: bool = False) -> dict[str, Any]:
    """An evaluation object; `nll`, `kl`, `agree` move its means per token, with paired noise of another seed when they do."""
    base, own = np.random.default_rng(99), np.random.default_rng(seed)
    tokens = base.integers(200, 256, clusters)
    reference = base.normal(1.7, 0.3, clusters)
    level = base.lognormal(-2.7, 0.3, clusters)
    wobble = own.normal(0, noise, clusters) if seed else np.zeros(clusters)
    rows = [
        Cluster(
            int(t), float((r + 0.05 + nll + w) * t), None if alone else float(r * t), None if alone else float((k + kl + w / 10) * t), None if alone else round((0.9 + agree) * t)
        )
        for t, r, k, w in zip(tokens, reference, level, wobble, strict=True)
    ]
    n = sum(c.tokens for c in rows)
    made = Evaluation(
        "ab" * 32,
        {"window": 256, "bos": True},
        "qforge 0.1.0",
        n,
        {"perplexity": float(np.exp(sum(c.nll_candidate for c in rows) / n))},
        rows,
        kl_mean=None if alone else sum(c.kl_sum or 0 for c in rows) / n,
    )
    return json.loads(json.dumps(asdict(made)))


def task(right: str, *, kept: bool = True, fewshot: int = 0) -> dict[str, Any]:
    share = right.count("1") / len(right)
    metric = {"reference": 0.9, "candidate": share, "difference": share - 0.9, "lost": 0, "gained": 0, **({"right": right} if kept else {})}
    return {"questions": len(right), "metrics": {"acc": metric, "bits": {"reference": 1.5, "candidate": 2 - share}}, "protocol": {"fewshot": fewshot, "engine": right}}


@dataclass
class Windows:
    ids: list[list[int]]
    documents: list[int]
    sha256: str = "a" * 64
    protocol: dict[str, Any] = field(default_factory=lambda: {"window": 300})
    bytes: list[int] | None = None
    scored: list[list[int]] | None = None
