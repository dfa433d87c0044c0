"""Descent on the layer's own error tr((W - Q) H (W - Q)^T) after the codes have been chosen: least squares over scales, then every code in turn.

GPTQ decides each column once, on scales that were fixed beforehand. From its result, coordinate descent over the codes (QuantEase, arXiv 2309.01885) and
over the scales of the groups never makes the error larger; both use the Hessian that is there already and never see a token.

Letters: O output features, I input features, C groups, G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qforge import numerics
from qforge.methods import native
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry

ELEMENTS = 1 << 22  # of a weight (or of its scales' equations) refined at once: rows are independent, and half a dozen arrays of that size are held
SYSTEMS = 64  # rows whose scales are solved for at once, which copies their matrices


def applies(scheme: Scheme) -> bool:
    """Whether a scheme's codes are steps of a scale that belongs to one output row."""
    return scheme.number.is_int and scheme.symmetry is not Symmetry.OFFSET and scheme.granularity.per in (Per.CHANNEL, Per.GROUP) and scheme.scale.super_granularity is None


def refine(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, sweeps: int) -> QuantizedLinear:
    """Codes and scales with a smaller error.

    Args:
        weight: the target `[O, I]` fp32.
        q: its codes and scales; groups contiguous, `applies(q.scheme)`.
        hessian: `[I, I]` fp32, symmetric, damped.
        sweeps: over scales and codes.
    """
    rows = max(SYSTEMS, ELEMENTS // max(weight.shape[1], q.scales.shape[1] ** 2))
    parts = [_refine_rows(w, replace(q, codes=c, scales=s, zeros=z), hessian, sweeps) for w, c, s, z in _by_rows(weight, q, rows)]
    return replace(q, codes=torch.cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts]))


def _by_rows(weight: torch.Tensor, q: QuantizedLinear, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Weight, codes, scales and zeros of a few rows at a time."""
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        yield weight[part], q.codes[part].clone(), q.scales[part], None if q.zeros is None else q.zeros[part]


def _refine_rows(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, sweeps: int) -> QuantizedLinear:
    group = (torch.arange(q.in_features) // q.scheme.granularity.group_size(q.in_features)).int()
    error, gradient = _error(weight, q, hessian)
    for _ in range(sweeps):
        fitted = replace(q, scales=_fitted_scales(q, gradient, hessian))
        new_error, new_gradient = _error(weight, fitted, hessian)
        better = (new_error < error)[:, None]  # rounding to the stored type, or a bound, may spoil a row
        q = replace(q, scales=torch.where(better, fitted.scales, q.scales))
        gradient = torch.where(better, new_gradient, gradient)
        if native.runs(q.scheme):
            native.refine_codes(hessian, gradient, q.codes, q.scales, group, q.scheme, 1)
        else:
            _sweep(hessian, gradient, q.codes, q.scales, group, q.scheme)
        error = _row_errors(weight, q, gradient)
    return q


def _error(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The error of each row `[O]`, and (W - Q) H `[O, I]`."""
    gradient = (weight - numerics.dequantize(q)) @ hessian
    return _row_errors(weight, q, gradient), gradient


def _row_errors(weight: torch.Tensor, q: QuantizedLinear, gradient: torch.Tensor) -> torch.Tensor:
    return (gradient * (weight - numerics.dequantize(q))).sum(1)


def _fitted_scales(q: QuantizedLinear, gradient: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """The scales `[O, C]` that are best for these codes (least squares over all groups of a row), rounded to the type in which they are stored.

    A scale moves by half at most, so that none changes its sign.
    """
    out_features, groups = q.scales.shape
    size = q.in_features // groups
    steps = q.codes.float() - (0 if q.zeros is None else numerics.expand(q.zeros, q.scheme, q.out_features, q.in_features).float())
    by_group_OCG = steps.view(out_features, groups, size)
    normal = torch.empty(out_features, groups, groups)
    for g in range(groups):
        columns = slice(g * size, (g + 1) * size)
        normal[:, g] = ((steps[:, columns] @ hessian[columns]).view_as(by_group_OCG) * by_group_OCG).sum(2)
    slope = (gradient.view_as(by_group_OCG) * by_group_OCG).sum(2)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal + (diagonal <= 0)  # a group of zeros has no say
    change = torch.cat([torch.linalg.solve(*part) for part in zip(normal.split(SYSTEMS), slope.split(SYSTEMS), strict=True)])
    wanted = q.scales + change.nan_to_num(0.0, 0.0, 0.0).clamp(-q.scales / 2, q.scales / 2)
    return numerics.round_scale(wanted, q.scheme.scale.type)


def _sweep(hessian: torch.Tensor, gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: torch.Tensor, scheme: Scheme) -> None:
    """What `native.refine_codes` does, all rows at once, column by column."""
    low, high = scheme.code_range
    for j in range(codes.shape[1]):
        if hessian[j, j] <= 0:
            continue
        scale, old = scales[:, int(group[j])], codes[:, j].float()
        new = torch.round((old + gradient[:, j] / (hessian[j, j] * scale)).clamp(low, high))
        gradient.addr_((new - old) * scale, hessian[j], alpha=-1)
        codes[:, j] = new.to(codes.dtype)
