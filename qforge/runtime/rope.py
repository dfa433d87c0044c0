"""Rotary embedding: a RopeSpec -> frequencies, as transformers computes them (fp32 throughout)."""

from __future__ import annotations

import math

import torch

from qforge.errors import ModelError
from qforge.types import RopeSpec

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "none")
_YARN = ("factor", "original_max_position_embeddings")  # what it cannot be computed without


def supports(rope: RopeSpec) -> str | None:
    """None if the tables of this embedding can be computed; otherwise the reason why not."""
    if rope.kind not in KINDS:
        return f"its rotary scaling '{rope.kind}' is not available (these are: {', '.join(KINDS)})"
    missing = [name for name in _YARN if name not in dict(rope.parameters)] if rope.kind == "yarn" else []
    if missing:
        return f"its rotary scaling '{rope.kind}' lacks {missing[0]}"
    return None if 1e-6 < abs(rope.amplitude) < 1e6 else f"its rotary scaling multiplies queries and keys by {rope.amplitude:g}"


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` fp32 radians per position, 0 for dimensions that do not turn, which come last (`row_order`).

    Raises:
        ModelError: they are not finite.
    """
    turned = rope.turned(head_dim)
    try:
        found = torch.cat((_scaled(rope, turned), torch.zeros((head_dim - turned) // 2)))
    except (ValueError, ArithmeticError):  # of a logarithm or a quotient
        found = torch.tensor(torch.nan)
    if not torch.isfinite(found).all():
        raise ModelError(f"the config's rotary parameters give no frequencies: rope_theta {rope.theta}, {dict(rope.parameters)}")
    return found


def row_order(rope: RopeSpec, heads: int, head_dim: int) -> torch.Tensor | None:
    """Where only a part of a head turns, or neighbours do: rows of queries or keys in the order in which the decoders rotate whole heads, pairs being dimensions i and
    i + head_dim / 2; else None.

    The model pairs i and i + rotated / 2 (or 2 i and 2 i + 1), and nothing else: with queries and keys in another order, the same in both, q.k is what it was.
    int64 `[heads head_dim]`.
    """
    if not rope.rotated and not rope.interleaved:
        return None
    count = rope.turned(head_dim)
    pairs = torch.arange(count).view(-1, 2).T if rope.interleaved else torch.arange(count).view(2, -1)
    turned, still = pairs.unbind(), torch.arange(count, head_dim).view(2, -1).unbind()
    head = torch.cat((turned[0], still[0], turned[1], still[1]))
    return (torch.arange(heads)[:, None] * head_dim + head).flatten()


def _scaled(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """llama3: Llama 3.1's piecewise scaling by wavelength. none: no angle at any position, so that the rotation leaves all as it is."""
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    parameters = dict(rope.parameters)
    if rope.kind == "linear":
        return inverse / parameters["factor"]
    if rope.kind == "llama3":
        return _llama3(inverse, parameters)
    return _yarn(inverse, rope.theta, parameters) if rope.kind == "yarn" else inverse


def _llama3(inverse: torch.Tensor, p: dict[str, float]) -> torch.Tensor:
    old = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (old / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    between = (1 - smooth) * (inverse / p["factor"]) + smooth * inverse
    scaled = torch.where(wavelength > old / p["low_freq_factor"], inverse / p["factor"], inverse)
    middle = (wavelength <= old / p["low_freq_factor"]) & (wavelength >= old / p["high_freq_factor"])
    return torch.where(middle, between, scaled)


def _yarn(inverse: torch.Tensor, theta: float, p: dict[str, float]) -> torch.Tensor:
    """Frequencies that turn often within the original context are kept, those that turn less than once are divided, with a ramp between (YaRN, arXiv 2309.00071, section 3.2)."""
    half = len(inverse)

    def place(turns: float) -> float:
        return half * math.log(p["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)

    first, last = place(p.get("beta_fast") or 32.0), place(p.get("beta_slow") or 1.0)
    if p.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    kept = 1 - ((torch.arange(half, dtype=torch.float32) - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return inverse / p["factor"] * (1 - kept) + inverse * kept
