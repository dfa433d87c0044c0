"""Cosines and sines of a rotary embedding, grown as positions are asked for. Needs no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class RopeTable:
    """Tables `[positions, head_dim / 2]` fp32. Angles are fp32, as transformers has them; their cosines and sines are the nearest fp32 numbers.

    Args:
        frequencies: `[head_dim / 2]` fp32, radians per position.
    """

    def __init__(self, frequencies: Floats) -> None:
        self._frequencies = frequencies
        self._tables = self._compute(256)

    def upto(self, positions: int) -> tuple[Floats, Floats]:
        """Tables for at least `positions` positions."""
        if len(self._tables[0]) < positions:
            self._tables = self._compute(1 << (positions - 1).bit_length())
        return self._tables

    def _compute(self, positions: int) -> tuple[Floats, Floats]:
        angles = (np.arange(positions, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
