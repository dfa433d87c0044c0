"""Choosing scales: range, or the smallest weighted squared rounding error over a grid of shrunken ranges.

The grid search is what GPTQ's reference code and AutoGPTQ call `mse`, here with squares and with the calibration's diagonal as weights.
"""

from __future__ import annotations

import torch

from qforge.methods import native
from qforge.numerics import decode, encode, expand, groups, has_common_scale, minmax_parameters
from qforge.scheme import Per, Scheme

LANES = 8  # of the compiled search (kernels/quantize/solver.cpp)
GRID = tuple(1.0 - 0.025 * i for i in range(21))  # ranges from 100 % down to 50 %


def choose(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None, search: bool, reach: float = 0.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales `[R, C]` and zeros for a weight `[O, I]`.

    Args:
        weight: fp32 `[O, I]`.
        scheme: the target.
        importance: `[I]` fp32 weights of the squared error (the Hessian's diagonal), or None for equal ones.
        search: False takes the full range.
        reach: see `numerics.minmax_parameters`; an only scale that is made for it is not searched.
    """
    scales, zeros = minmax_parameters(weight, scheme, reach=reach)
    if not search or (reach and has_common_scale(scheme) and scales.numel() == 1):
        return scales, zeros
    weights = torch.ones(weight.shape[1]) if importance is None else importance / importance.mean().clamp(min=1e-30) + 1e-6
    if native.runs(scheme) and scheme.granularity.per is not Per.TENSOR and scheme.scale.super_granularity is None:
        return _search_native(weight, scheme, weights)
    best = _error(weight, scheme, scales, zeros, weights)
    for shrink in GRID[1:]:
        s, z = minmax_parameters(weight, scheme, shrink, reach)
        error = _error(weight, scheme, s, z, weights)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, s, scales)
        if zeros is not None and z is not None:
            zeros = torch.where(better, z, zeros)
    return scales, zeros


def _search_native(weight: torch.Tensor, scheme: Scheme, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    scales, zeros = minmax_parameters(weight, scheme, torch.tensor(GRID)[:, None, None])
    best = native.best_scale(weight, weights, scales, zeros, scheme).long()[None]
    return scales.gather(0, best)[0], None if zeros is None else zeros.gather(0, best)[0]


def _error(weight: torch.Tensor, scheme: Scheme, scales: torch.Tensor, zeros: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
    o, i = weight.shape
    scale, zero = expand(scales, scheme, o, i), None if zeros is None else expand(zeros, scheme, o, i)
    rounded = decode(encode(weight, scale, zero, scheme), scale, zero, scheme)
    terms = groups((rounded - weight).square_().mul_(weights), scheme)
    return _sum(terms) if scheme.granularity.per in (Per.CHANNEL, Per.GROUP) else _sum_of_halves(terms)


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """`[R, C, n] -> [R, C]`, the same bits on every device and as the compiled search's: eight running sums, added as it adds them."""
    whole = terms.shape[-1] // LANES * LANES
    lanes = torch.zeros(*terms.shape[:-1], LANES, device=terms.device)
    for start in range(0, whole, LANES):
        lanes = lanes + terms[..., start : start + LANES]
    four = lanes[..., :4] + lanes[..., 4:]
    total = (four[..., 0] + four[..., 1]) + (four[..., 2] + four[..., 3])
    for i in range(whole, terms.shape[-1]):
        total = total + terms[..., i]
    return total


def _sum_of_halves(terms: torch.Tensor) -> torch.Tensor:
    """`[R, C, n] -> [R, C]` for a large n, the same bits on every device."""
    while terms.shape[-1] > 1:
        first, second = torch.nn.functional.pad(terms, (0, terms.shape[-1] % 2)).chunk(2, -1)
        terms = first + second
    return terms[..., 0]
