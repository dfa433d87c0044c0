"""Rotary embedding: a RopeSpec -> frequencies, as transformers computes them (fp32 throughout)."""

from __future__ import annotations

import math

import torch

from qforge.errors import ModelError
from qforge.types import RopeSpec

KINDS = ("default", "linear", "llama3", "none")


def supports(rope: RopeSpec) -> str | None:
    """None if the tables of this embedding can be computed; otherwise the reason why not."""
    return None if rope.kind in KINDS else f"its rotary scaling '{rope.kind}' is not available (these are: {', '.join(KINDS)})"


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """`[head_dim / 2]` fp32 radians per position.

    Raises:
        ModelError: they are not finite.
    """
    found = _scaled(rope, head_dim)
    if not torch.isfinite(found).all():
        raise ModelError(f"the config's rotary parameters give no frequencies: rope_theta {rope.theta}, {dict(rope.parameters)}")
    return found


def _scaled(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """llama3: Llama 3.1's piecewise scaling by wavelength. none: no angle at any position, so that the rotation leaves all as it is."""
    if rope.kind == "none":
        return torch.zeros(head_dim // 2)
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    parameters = dict(rope.parameters)
    if rope.kind == "linear":
        return inverse / parameters["factor"]
    if rope.kind == "llama3":
        return _llama3(inverse, parameters)
    return inverse


def _llama3(inverse: torch.Tensor, p: dict[str, float]) -> torch.Tensor:
    old = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (old / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    between = (1 - smooth) * (inverse / p["factor"]) + smooth * inverse
    scaled = torch.where(wavelength > old / p["low_freq_factor"], inverse / p["factor"], inverse)
    middle = (wavelength <= old / p["low_freq_factor"]) & (wavelength >= old / p["high_freq_factor"])
    return torch.where(middle, between, scaled)
