"""What the integer rate of a CPU allows of a load: output tokens a second if only multiplications of bytes took time, one for each product of a weight or of a cached number.

A kernel that gets by with fewer multiplications (avx512-vnni-pairs) can pass it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("integer_rate.cpp")


def integer_rate(threads: int, instruction_set: str) -> float | None:
    """Multiplications a second of all threads together, measured; None where the instruction set has no instruction for them, or no C++ compiler is here."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "integer_rate"
        try:
            subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-pthread", "-o", str(program), str(SOURCE)], check=True, capture_output=True)
            done = subprocess.run([str(program), str(threads), instruction_set.removesuffix("-pairs")], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return float(done.stdout)


def multiplications(model: Path, requests: list[dict[str, Any]]) -> int:
    """Of a load: every token but each request's last passes the layers, and attention multiplies it with all that came before; every output passes the head."""
    c = json.loads((model / "config.json").read_text())
    heads, hidden, layers = c["num_attention_heads"], c["hidden_size"], c["num_hidden_layers"]
    wide = heads * (c.get("head_dim") or hidden // heads)
    narrow = wide * c.get("num_key_value_heads", heads) // heads
    layer = hidden * (wide + 2 * narrow) + wide * hidden + 3 * hidden * c["intermediate_size"]
    lengths = [len(r["prompt"]) + r["output"] - 1 for r in requests]
    seen = sum(n * (n + 1) // 2 for n in lengths)
    return layers * (layer * sum(lengths) + 2 * wide * seen) + hidden * c["vocab_size"] * sum(r["output"] for r in requests)


def said(rate: float | None, count: int, outputs: int, theirs: float | None) -> str:
    """The goal in words: 2.5 times the other engine, or three quarters of the ceiling where that is less."""
    if rate is None or theirs is None:
        return ""
    ceiling = rate * outputs / count
    goal, which = min((2.5 * theirs, "2.5 times theirs"), (0.75 * ceiling, "three quarters of the ceiling"))
    return (
        f"32 requests take {count:.3g} integer multiplications, one for each product (pairs need fewer); at {rate / 1e9:.0f}e9 a second, "
        f"the better of before and after the rounds, that is a ceiling of {ceiling:.0f} output tokens/s. "
        f"Goal: {goal:.0f}, {which} (2.5 times theirs: {2.5 * theirs:.0f}, three quarters of the ceiling: {0.75 * ceiling:.0f})."
    )
