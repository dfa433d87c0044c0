"""Descent on the layer's own error tr((W - Q) H (W - Q)^T) after the codes have been chosen: every scale in turn, then every code in turn.

GPTQ decides each column once, on scales that were fixed beforehand. From its result, coordinate descent over the codes (QuantEase, arXiv 2309.01885) and
over the scales of the groups never makes the error larger; both use the Hessian that is there already and never see a token.

Letters: O output features, I input features, n inputs of some groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qforge import numerics
from qforge.methods import native
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry

ELEMENTS = 1 << 22  # of a weight refined at once: rows are independent, and some arrays of that size are held
COLUMNS = 256  # whose effects on all others are pushed on together


def applies(scheme: Scheme) -> bool:
    """Whether a scheme's codes are multiples of a scale that belongs to one output row."""
    return scheme.symmetry is not Symmetry.OFFSET and scheme.granularity.per in (Per.CHANNEL, Per.GROUP) and scheme.scale.super_granularity is None


def refine(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, sweeps: int) -> QuantizedLinear:
    """Codes and scales with a smaller error.

    Args:
        weight: the target `[O, I]` fp32.
        q: its codes and scales; groups contiguous, `applies(q.scheme)`.
        hessian: `[I, I]` fp32, symmetric, damped.
        sweeps: over scales and codes.
    """
    rows = max(1, ELEMENTS // weight.shape[1])
    parts = [_refine_rows(w, replace(q, codes=c, scales=s, zeros=z), hessian, sweeps) for w, c, s, z in _by_rows(weight, q, rows)]
    return replace(q, codes=torch.cat([p.codes for p in parts]), scales=torch.cat([p.scales for p in parts]))


def _by_rows(weight: torch.Tensor, q: QuantizedLinear, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Weight, codes, scales and zeros of a few rows at a time."""
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        yield weight[part], q.codes[part].clone(), q.scales[part], None if q.zeros is None else q.zeros[part]


def _refine_rows(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, sweeps: int) -> QuantizedLinear:
    group = (torch.arange(q.in_features) // q.scheme.granularity.group_size(q.in_features)).int()
    gradient = (weight - numerics.dequantize(q)) @ hessian  # (W - Q) H, kept up to date
    q = replace(q, scales=q.scales.clone())
    for _ in range(sweeps):
        _fit_scales(hessian, gradient, q)
        if native.runs(q.scheme):
            native.refine_codes(hessian, gradient, q.codes, q.scales, group, q.scheme, 1)
        else:
            _sweep(hessian, gradient, q.codes, q.scales, group, q.scheme)
    return q


def _fit_scales(hessian: torch.Tensor, gradient: torch.Tensor, q: QuantizedLinear) -> None:
    """Every scale in turn becomes the best one given codes and all other scales, in place, where that is still better once it is rounded to the stored type.

    A scale moves by half at most, so that none changes its sign.
    """
    size = q.in_features // q.scales.shape[1]
    width = size * max(1, COLUMNS // size)
    for start in range(0, q.in_features, width):
        here = slice(start, min(start + width, q.in_features))
        steps = _steps(q, here)
        slopes, curvature = gradient[:, here].clone(), hessian[here, here]
        for first in range(0, steps.shape[1], size):
            mine = slice(first, first + size)
            scales = q.scales[:, (start + first) // size]
            change = _scale_change(steps[:, mine], slopes[:, mine], curvature[mine, mine], scales, q.scheme)
            scales += change
            steps[:, mine] *= change[:, None]  # from here on what the group's values gain
            slopes.addmm_(steps[:, mine], curvature[mine], alpha=-1)
        gradient.addmm_(steps, hessian[here], alpha=-1)


def _steps(q: QuantizedLinear, columns: slice) -> torch.Tensor:
    """What the scales of columns multiply, `[O, n]` fp32."""
    steps = _steps_of(q.codes[:, columns], q.scheme)
    if q.zeros is not None:
        size = q.in_features // q.zeros.shape[1]
        steps -= q.zeros[:, columns.start // size : columns.stop // size].float().repeat_interleave(size, 1)
    return steps


def _steps_of(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes as numbers; of integers with zero points those are still to be subtracted."""
    return numerics.decode(codes, torch.ones(()), None, scheme)


def _scale_change(steps: torch.Tensor, slopes: torch.Tensor, curvature: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """What is added to the scales `[O]` of one group: zero where nothing, or nothing that can be stored, makes the error smaller."""
    slope, bend = (slopes * steps).sum(1), ((steps @ curvature) * steps).sum(1)
    wanted = scales + (slope / bend).nan_to_num(0.0, 0.0, 0.0).clamp(-scales / 2, scales / 2)
    change = numerics.round_scale(wanted, scheme.scale.type) - scales
    return torch.where(change * (2 * slope - change * bend) > 0, change, 0.0)


def _sweep(hessian: torch.Tensor, gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: torch.Tensor, scheme: Scheme) -> None:
    """What `native.refine_codes` does, all rows at once, column by column, for every scheme: the nearest code is the best one."""
    strengths, of_column, one = hessian.diagonal().tolist(), group.tolist(), torch.ones(())  # nothing in the loop waits for a card
    scales_CO = scales.T.contiguous()
    for start in range(0, codes.shape[1], COLUMNS):
        here = slice(start, start + COLUMNS)
        curvature, codes_IO = hessian[here, here], codes[:, here].T.contiguous()
        slopes_IO = gradient[:, here].T.clone(memory_format=torch.contiguous_format)  # of one row, contiguous() would be the gradient itself
        steps_IO, moved_IO = _steps_of(codes_IO, scheme), torch.zeros_like(slopes_IO)
        for j in range(len(slopes_IO)):
            column = start + j
            if strengths[column] <= 0:
                continue
            scale_O, old_O = scales_CO[of_column[column]], steps_IO[j]
            codes_IO[j] = numerics.encode(old_O + slopes_IO[j] / (strengths[column] * scale_O), one, None, scheme)
            torch.mul(numerics.decode(codes_IO[j], one, None, scheme) - old_O, scale_O, out=moved_IO[j])
            slopes_IO[j + 1 :].addr_(curvature[j, j + 1 :], moved_IO[j], alpha=-1)
        codes[:, here] = codes_IO.T
        gradient.addmm_(moved_IO.T.contiguous(), hessian[here], alpha=-1)
