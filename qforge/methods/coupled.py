"""Descent as in `refine.py` where the errors of different outputs are weighed by how much the model's predictions depend on them: tr(G (W - Q) H (W - Q)^T).

G is the mean of g g^T, g the gradient of log p(y) by the linear's outputs, y drawn from the model's own predictions. G and H are the two Kronecker factors of the Fisher
information (KFAC, Martens & Grosse, arXiv 1503.05671), which is the Hessian of the model's KL divergence: what is made smaller is a second-order estimate of the divergence itself,
as in YAQA (arXiv 2505.22988), here by coordinate descent over codes and scales instead of feedback.

Letters: O output features, I input features, C groups, G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from qforge import numerics
from qforge.errors import NumericalError
from qforge.methods import native
from qforge.methods import refine as single
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme

DAMPING = 0.3  # of the mean diagonal. KL divergence of stories15M with .01, .1, .3, 1: .0310, .0308, .0295, .0301; without outputs weighed: .0333
COLUMNS = 128  # inputs whose effects on later ones are pushed on together
ROWS = 128  # outputs, likewise: one after the other within a tile, by a matrix product beyond it


def applies(scheme: Scheme) -> bool:
    """Whether the loops here handle a scheme."""
    return scheme.number.is_int and single.applies(scheme)


def damped(outputs: torch.Tensor) -> torch.Tensor:
    """The weighing `[O, O]` fp32 that `refine` takes: mean diagonal 1 before damping. Where predictions do not depend on any output, all count alike.

    Raises:
        NumericalError: it is not finite.
    """
    outputs = outputs.float()
    mean = float(outputs.diagonal().mean())
    if not torch.isfinite(outputs).all():
        raise NumericalError("the gradients of the model's predictions are NaN or infinite; the model overflows on this text")
    identity = torch.eye(len(outputs))
    return outputs / mean + DAMPING * identity if mean > 0 else identity


def refine(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, outputs: torch.Tensor, sweeps: int) -> QuantizedLinear:
    """Codes and scales with a smaller weighed error; every sweep makes it smaller or leaves it.

    Args:
        weight: the target `[O, I]` fp32.
        q: its codes and scales; groups contiguous, `applies(q.scheme)`.
        hessian: `[I, I]` fp32, symmetric, damped.
        outputs: `[O, O]` fp32, from `damped`.
        sweeps: over scales and codes.
    """
    q = replace(q, codes=q.codes.clone())
    error, gradient = _error(weight, q, hessian, outputs)
    for _ in range(sweeps):
        fitted = replace(q, scales=numerics.round_scale(_fitted_scales(q, gradient, hessian, outputs), q.scheme.scale.type))
        new_error, new_gradient = _error(weight, fitted, hessian, outputs)
        if new_error < error:  # rounding to the stored type may spoil it
            q, gradient = fitted, new_gradient
        _refine_codes(q, gradient, hessian, outputs)
        error = float((gradient * (weight - numerics.dequantize(q))).sum())
    return q


def _error(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, outputs: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The weighed error, and G (W - Q) H `[O, I]`."""
    difference = weight - numerics.dequantize(q)
    gradient = outputs @ (difference @ hessian)
    return float((gradient * difference).sum()), gradient


def _fitted_scales(q: QuantizedLinear, gradient: torch.Tensor, hessian: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Scales `[O, C]` after every one in turn, group by group, was made the best given all others; codes stay."""
    steps = q.codes.float() - (0 if q.zeros is None else numerics.expand(q.zeros, q.scheme, q.out_features, q.in_features).float())
    scales_CO = q.scales.T.clone(memory_format=torch.contiguous_format)
    size = q.in_features // len(scales_CO)
    gradient = gradient.clone()
    change = native.refine_group_scales if native.module() is not None else _refine_group_scales
    for c, scales in enumerate(scales_CO):
        here, later = slice(c * size, (c + 1) * size), slice((c + 1) * size, None)
        before, mine, slopes, curvature = scales.clone(), steps[:, here].contiguous(), gradient[:, here].contiguous(), hessian[here, here].contiguous()
        weighed = torch.zeros_like(mine)  # G times what the group's weights have gained
        for rows, below in _tiles(len(scales)):
            change(outputs[rows, rows].contiguous(), curvature, mine[rows], slopes[rows], scales[rows])
            gained = outputs[:, rows] @ ((scales - before)[rows, None] * mine[rows])
            slopes[below] -= gained[below] @ curvature
            weighed += gained
        gradient[:, later] -= weighed @ hessian[here, later]
    return scales_CO.T.contiguous()


def _refine_codes(q: QuantizedLinear, gradient: torch.Tensor, hessian: torch.Tensor, outputs: torch.Tensor) -> None:
    """Every code in turn becomes the best one given all others, in place, and the gradient what it then is."""
    by_group = q.scales.T.contiguous()
    group = (torch.arange(q.in_features) // (q.in_features // len(by_group))).int()
    change = native.refine_columns if native.runs(q.scheme) else _refine_columns
    for start in range(0, q.in_features, COLUMNS):
        here = slice(start, start + COLUMNS)
        curvature, scales_nO = hessian[here, here].contiguous(), by_group[group[here].long()]
        slopes_nO = gradient[:, here].T.clone(memory_format=torch.contiguous_format)  # of one output, contiguous() would be the gradient itself
        moved_nO = torch.zeros_like(slopes_nO)
        for rows, below in _tiles(q.out_features):
            codes = q.codes[rows, here].T.clone(memory_format=torch.contiguous_format)
            before = codes.float()
            change(outputs[rows, rows].contiguous(), curvature, slopes_nO[:, rows].contiguous(), codes, by_group[:, rows].contiguous(), group[here].contiguous(), q.scheme)
            moved_nO[:, rows] = (codes.float() - before) * scales_nO[:, rows]
            q.codes[rows, here] = codes.T
            slopes_nO[:, below] -= (curvature @ moved_nO[:, rows]) @ outputs[rows, below]
        gradient -= (outputs @ moved_nO.T) @ hessian[here]


def _tiles(count: int) -> Iterator[tuple[slice, slice]]:
    """Some outputs, and those after them."""
    return ((slice(start, start + ROWS), slice(start + ROWS, None)) for start in range(0, count, ROWS))


def _refine_columns(outputs: torch.Tensor, hessian: torch.Tensor, gradient: torch.Tensor, codes: torch.Tensor, by_group: torch.Tensor, group: torch.Tensor, scheme: Scheme) -> None:
    """What `native.refine_columns` does."""
    low, high = scheme.code_range
    for j in range(len(codes)):
        if hessian[j, j] <= 0:
            continue
        scales, before = by_group[int(group[j])], gradient[j].clone()
        for o in range(codes.shape[1]):
            old = float(codes[j, o])
            new = torch.round((old + gradient[j, o] / (outputs[o, o] * hessian[j, j] * scales[o])).clamp(low, high))
            if new != old:
                gradient[j] -= outputs[o] * ((new - old) * scales[o] * hessian[j, j])
                codes[j, o] = new.to(codes.dtype)
        gradient[j + 1 :] -= hessian[j, j + 1 :, None] * ((before - gradient[j]) / hessian[j, j])


def _refine_group_scales(outputs: torch.Tensor, hessian: torch.Tensor, steps: torch.Tensor, gradient: torch.Tensor, scales: torch.Tensor) -> None:
    """What `native.refine_group_scales` does."""
    effects = steps @ hessian
    for o in range(len(scales)):
        curvature = float(effects[o] @ steps[o]) * float(outputs[o, o])
        if curvature > 0:
            change = (gradient[o] @ steps[o] / curvature).clamp(-scales[o] / 4, scales[o] / 4)
            scales[o] += change
            gradient -= outputs[o][:, None] * (change * effects[o])
