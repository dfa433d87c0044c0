"""Keys and values on their way into a cache, in transformers' own modelling code: seen, or changed, where it would store them (rotated, and after norms)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from qforge import numerics
from qforge.scheme import Granularity, Number, Per, Scheme

FP8 = Scheme(Number.FP8_E4M3, Granularity(Per.TENSOR))
Pair = tuple[torch.Tensor, torch.Tensor]


class Passing(DynamicCache):  # type: ignore[misc]
    """Stores nothing: keys and values `[B, heads, T, head_dim]` come back as `through` gives them."""

    def __init__(self, through: Callable[[torch.Tensor, torch.Tensor], Pair]) -> None:
        super().__init__()
        self._through = through

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """What attention multiplies."""
        return self._through(key_states, value_states)


def rounded_cache(scales: tuple[float, float]) -> Passing:
    """A cache that gives keys and values back rounded to FP8 E4M3 with these scales."""

    def through(keys: torch.Tensor, values: torch.Tensor) -> Pair:
        return _rounded(keys, scales[0]), _rounded(values, scales[1])

    return Passing(through)


def unrounded() -> Passing:
    """A cache that gives keys and values back as they are."""
    return Passing(lambda keys, values: (keys, values))


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    by = torch.full((), scale, device=x.device)
    return numerics.decode(numerics.encode(x.float(), by, None, FP8), by, None, FP8).to(x.dtype)
