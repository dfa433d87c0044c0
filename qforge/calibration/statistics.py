"""Sums over the inputs of one linear (shared by linears with the same input), in fp32, in the order in which batches come; those of several processes are merged.

Letters: O output features, I input features, N rows (tokens).
"""

from __future__ import annotations

import math

import torch

from qforge.methods import Stats, native

SAMPLE = 512  # rows that are kept at most
SPREAD = 2_654_435_761  # 2^32 over the golden ratio (Knuth, volume 3, 6.4): its multiples fall evenly, and rows a power of two apart (first tokens!) no more often than others
COLUMNS = 256  # of a product: the Hessian is symmetric, so only the tiles on and below its diagonal are computed


class Sums:
    """Adds batch after batch.

    Args:
        needs: what a method reads: `hessian`, `cross`, `absmax`, `sample`.
        in_features: I.
        first: rows before these, which other `Sums` are of.
        out_features: O where `add` is told of a residual stream; 0 for none.
    """

    def __init__(self, needs: frozenset[str], in_features: int, first: int = 0, out_features: int = 0) -> None:
        self._first, self._tokens, self._in_features = first, 0, in_features
        self._largest = self._energy = 0.0
        self._hessian = torch.zeros(in_features, in_features) if "hessian" in needs else None
        self._cross = torch.zeros(in_features, in_features) if "cross" in needs else None
        self._residual = torch.zeros(out_features, in_features) if out_features else None
        self._absmax = torch.zeros(in_features) if "absmax" in needs else None
        self._sample: list[torch.Tensor] | None = [] if "sample" in needs else None
        self._kept: list[torch.Tensor] = []  # the places of the sample's rows
        self._below = 1 << 32

    def add(self, inputs: torch.Tensor, originals: torch.Tensor | None = None, lacking: torch.Tensor | None = None) -> None:
        """Add inputs `[..., I]`, what the unquantized model has in their place (for `cross`), and what it has more `[..., O]` in what the linear's output is added to."""
        x = inputs.reshape(-1, inputs.shape[-1]).float().contiguous()
        first, self._tokens = self._tokens, self._tokens + x.shape[0]
        if x.numel():
            self._largest = max(self._largest, *(abs(float(end)) for end in torch.aminmax(x)))  # torch's norm of infinite order takes 20 times as long
            self._energy += float(torch.linalg.vector_norm(x)) ** 2
        if self._hessian is not None:
            _add_square(x, self._hessian)
        if self._cross is not None and originals is not None:
            _add_products(difference(originals.reshape(x.shape), x), x, self._cross)
        if self._residual is not None and lacking is not None:
            _add_products(lacking.reshape(len(x), -1).float().contiguous(), x, self._residual)
        if self._absmax is not None:
            self._absmax = torch.maximum(self._absmax, x.abs().amax(0))
        if self._sample is not None:
            self._add_to_sample(x, (self._first + torch.arange(first, self._tokens)) * SPREAD % (1 << 32))

    def _add_to_sample(self, x: torch.Tensor, places: torch.Tensor) -> None:
        assert self._sample is not None
        self._sample.append(x[places < self._below])
        self._kept.append(places[places < self._below])
        self._thin_sample()

    def merge(self, other: Sums) -> None:
        """Add the sums over other rows of the same linear's inputs."""
        self._tokens += other._tokens
        self._largest, self._energy = max(self._largest, other._largest), self._energy + other._energy
        for own, others in ((self._hessian, other._hessian), (self._cross, other._cross), (self._residual, other._residual)):
            if own is not None and others is not None:
                own += others
        if self._absmax is not None and other._absmax is not None:
            self._absmax = torch.maximum(self._absmax, other._absmax)
        if self._sample is not None and other._sample is not None:
            self._sample += other._sample
            self._kept += other._kept
            self._below = min(self._below, other._below)
            self._drop_from_sample()
            self._thin_sample()

    def _thin_sample(self) -> None:
        while sum(map(len, self._sample or [])) > SAMPLE:
            self._below //= 2
            self._drop_from_sample()

    def _drop_from_sample(self) -> None:
        assert self._sample is not None
        self._sample = [rows[kept < self._below] for rows, kept in zip(self._sample, self._kept, strict=True)]
        self._kept = [kept[kept < self._below] for kept in self._kept]

    def stats(self) -> Stats:
        """The sums; nothing may be added afterwards."""
        if self._hessian is not None:
            width = native.tile() if native.has_bf16_products() else COLUMNS  # what is on the diagonal's tiles is whole
            for start in range(0, len(self._hessian), width):
                self._hessian[start : start + width, start + width :] = self._hessian[start + width :, start : start + width].T
        sample = None if self._sample is None else torch.cat([torch.empty(0, self._in_features), *self._sample])
        return Stats(self._tokens, self._hessian, self._cross, self._absmax, sample, self._peak(), self._residual)

    def _peak(self) -> float | None:
        known = self._energy > 0 and math.isfinite(self._energy)
        return self._largest / math.sqrt(self._energy / (self._tokens * self._in_features)) if known else None


def difference(wanted: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`wanted - x` in fp32, x rounded as what is wanted was, so that equal values have no difference; not where it is too large for that type."""
    rounded = x.to(wanted.dtype)
    if wanted.dtype == torch.float16 and rounded.isinf().any():
        return wanted.float().sub_(torch.where(rounded.isinf(), x, rounded.float()))
    return wanted.float().sub_(rounded)


def _add_square(x: torch.Tensor, into: torch.Tensor) -> None:
    """Add x^T x `[I, I]` on and below the diagonal."""
    if native.has_bf16_products():
        native.add_products(x, x, into, lower=True)
        return
    for start in range(0, len(into), COLUMNS):
        into[start:, start : start + COLUMNS].addmm_(x[:, start:].T, x[:, start : start + COLUMNS])


def _add_products(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> None:
    """Add left^T right, `[N, O]` and `[N, I]`."""
    if native.has_bf16_products():
        native.add_products(left, right, into)
    else:
        into.addmm_(left.T, right)
