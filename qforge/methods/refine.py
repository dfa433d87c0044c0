"""Descent on the layer's own error tr((W - Q) H (W - Q)^T) after the codes have been chosen: least squares over scales, then every code in turn.

GPTQ decides each column once, on scales that were fixed beforehand. From its result, coordinate descent over the codes (QuantEase, arXiv 2309.01885) and
over the scales of the groups never makes the error larger; both use the Hessian that is there already and never see a token.

Letters: O output features, I input features, C groups, G inputs of a group.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qforge import numerics
from qforge.methods import native
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme, Symmetry


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
    in_features = weight.shape[1]
    group = (torch.arange(in_features) // q.scheme.granularity.group_size(in_features)).int()
    codes, scales = q.codes.clone(), q.scales.clone()
    gradient = (weight - numerics.dequantize(q)) @ hessian
    for _ in range(sweeps):
        _fit_scales(codes, scales, q.zeros, gradient, hessian, q.scheme)
        if native.runs(q.scheme):
            native.refine_codes(hessian, gradient, codes, scales, group, q.scheme, 1)
        else:
            _sweep(hessian, gradient, codes, scales, group, q.scheme)
    return replace(q, codes=codes, scales=scales)


def _fit_scales(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, gradient: torch.Tensor, hessian: torch.Tensor, scheme: Scheme) -> None:
    """One after the other, the best scale of each group given all others, rounded to the type in which it is stored; in place."""
    size = scheme.granularity.group_size(codes.shape[1])
    for g in range(scales.shape[1]):
        columns = slice(g * size, (g + 1) * size)
        steps_OG = codes[:, columns].float() - (0 if zeros is None else zeros[:, g : g + 1].float())
        curvature = ((steps_OG @ hessian[columns, columns]) * steps_OG).sum(1)
        slope = (steps_OG * gradient[:, columns]).sum(1)
        old = scales[:, g]
        wanted = old + torch.where(curvature > 0, slope / curvature.clamp(min=1e-30), torch.zeros_like(slope))
        # A scale that would shrink to half stays: it belongs to a group whose codes are about to change, not to one that fits badly.
        new = numerics.round_scale(torch.where(wanted > 0.5 * old, wanted, old), scheme.scale.type)
        change = new - old
        better = change * (2 * slope - change * curvature) > 0  # rounding to the stored type may overshoot
        change = torch.where(better, change, torch.zeros_like(change))
        gradient -= (change[:, None] * steps_OG) @ hessian[columns]
        scales[:, g] = old + change


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
