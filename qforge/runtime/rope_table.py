"""Cosines and sines of a rotary embedding, grown as positions are asked for. Needs no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qforge.types import RopeSpec

Floats = npt.NDArray[np.float32]


class RopeTable:
    """Tables `[positions, head_dim / 2]` fp32. Angles are fp32, as transformers has them; their cosines and sines are the nearest fp32 numbers.

    Args:
        frequencies: `[head_dim / 2]` fp32, radians per position.
        rope: whose they are. Where scores are multiplied by its amplitude (`ModelSpec.score_scale`), pairs of dimensions that do not turn have its inverse for a cosine.
    """

    def __init__(self, frequencies: Floats, rope: RopeSpec) -> None:
        self._frequencies, self._rope = frequencies, rope
        self._tables = self._compute(256)

    def upto(self, positions: int) -> tuple[Floats, Floats]:
        """Tables for at least `positions` positions."""
        if len(self._tables[0]) < positions:
            self._tables = self._compute(1 << (positions - 1).bit_length())
        return self._tables

    def _compute(self, positions: int) -> tuple[Floats, Floats]:
        angles = (np.arange(positions, dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if self._rope.rotated:
            cosines[:, self._rope.rotated // 2 :] = 1.0 / self._rope.amplitude
        return cosines, sines
