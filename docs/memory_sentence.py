"""A sentence of `benchmarks/decode_by_memory.py`'s results: one sequence beside llama.cpp, by what memory gave."""

from __future__ import annotations

from typing import Any

from speed_table import MODELS


def sentence(results: dict[str, dict[str, Any]]) -> str:
    """One for each result."""
    return "\n".join(_of(name, found) for name, found in sorted(results.items()))


def _of(name: str, found: dict[str, Any]) -> str:
    parts = [
        f"where memory gave {r['memory']:.0f} GB/s ours read weights at {r['shares']['ours']:.0%} of that and llama.cpp at {r['shares']['llama.cpp']:.0%}, "
        f"{r['ours']:.1f} and {r['llama.cpp']:.1f} tokens/s, {r['ratio']:.2f} times ({r['most']:.2f} at most; {r['turns']} turns)"
        for r in found["rows"]
    ]
    model = next(said for key, said in MODELS.items() if f"-{key}-" in name)
    source = f"([results](../benchmarks/results/{name}.md), {found['environment']['date']})"
    return f"{model}, one sequence in {len(found['turns'])} short turns: {'; '.join(parts)} {source}."
