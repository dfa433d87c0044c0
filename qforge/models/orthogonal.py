"""An orthogonal matrix of any size that spreads a single large channel over all channels, applied without being formed.

Q = diag(signs) (C_m (x) H_64 (x) ..) for a size n = m 2^k, m odd: C_m is the orthonormal discrete cosine transform and H the Hadamard matrices of QuaRot (Ashkboos et al.,
arXiv 2404.00456), so that no entry is larger than sqrt(2 / n), and applying it takes a few times 64 n operations instead of n^2. The signs are seeded.

Letters: N channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_LARGEST = 64  # rows of one Hadamard factor
_TOGETHER = 1 << 20  # values that are in fp64 at a time


@dataclass(frozen=True, slots=True)
class Orthogonal:
    """Q `[N, N]` as its signs `[N]` and Kronecker factors, fp64."""

    signs: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        """N, the number of rows and of columns."""
        return len(self.signs)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """`x Q` for every N consecutive values of the last dimension of `x [..., K N]`; computed in fp64, returned in fp32 (fp64 for fp64)."""
        rows = x.reshape(-1, self.size)
        out = torch.empty(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        step = max(1, _TOGETHER // self.size)
        for start in range(0, len(rows), step):
            out[start : start + step] = self._turned(rows[start : start + step].double())
        return out.reshape(x.shape)

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """`Q^T W` for every N consecutive rows of `W [K N, ...]`: the weight, or bias, of a linear whose output is turned."""
        return self.columns(weight.movedim(0, -1).contiguous()).movedim(-1, 0).contiguous()

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        out = (x * self.signs).reshape(-1, *(len(f) for f in self.factors))
        for place, factor in enumerate(self.factors, start=1):
            out = (out.movedim(place, -1) @ factor).movedim(-1, place)
        return out.reshape(x.shape)


def orthogonal(size: int, seed: int) -> Orthogonal:
    """Q of a size; the seed chooses the signs."""
    odd, factors = size, []
    while odd % 2 == 0:
        factor = min(odd & -odd, _LARGEST)
        factors.append(_hadamard(factor))
        odd //= factor
    if odd > 1:
        factors.insert(0, _cosine(odd))
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    return Orthogonal(signs, tuple(factors))


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _cosine(size: int) -> torch.Tensor:
    """The orthonormal DCT-II."""
    k = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (k[:, None] + 0.5) * k) * math.sqrt(2 / size)
    matrix[:, 0] /= math.sqrt(2)
    return matrix
