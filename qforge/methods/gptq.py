"""GPTQ (Frantar et al., arXiv 2210.17323): quantize column by column and push each column's error onto the columns not yet quantized.

With H = sum x^T x of the calibration inputs and U the upper Cholesky factor of H^-1 (U^T U = H^-1), column j's rounding error e_j =
(w_j - q_j) / U_jj is subtracted from every later column k as e_j U_jk. Rows are independent of each other.

Groups are static: scales are chosen from the original weights before the loop, so the order of columns (falling diagonal of H,
`act_order`) needs no index at run time.

Two things are added, each an option. `error_correction`: with y the unquantized model's input in the place of x, W y is what the layer should give
when it is fed x, so the target becomes W + W (sum (y - x) x^T) H^-1 (GPTAQ, arXiv 2504.02692, and QEP, arXiv 2504.09629, in closed form). A linear whose output is added
to the residual stream makes up for what that lacks as well: with r what the unquantized model has more there, another `RESIDUAL` (sum r x^T) H^-1.
`refine`: descent over codes and scales afterwards (`refine.py`).

A Hessian of n tokens is known to a part of about I / n, and its small eigenvalues not at all where n < I (an expert that few tokens are routed to). So the damping
grows as n falls below 8 I. Output error on other text, int4 group 32, 768 inputs of stories15M, without / with that / rounding to nearest: 8 I tokens .0688 / .0688 / .0826,
I tokens .0783 / .0722 / .0828, I / 8 tokens .0878 / .0802 / .0848, I / 33 tokens .0894 / .0839 / .0882.

Letters: O output features, I input features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qforge import numerics
from qforge.errors import NumericalError
from qforge.methods import coupled, native, refine, scales
from qforge.methods.base import Options, Stats, check_finite
from qforge.methods.factor import inverse_factor
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Scheme

WELL_CONDITIONED = 1e5  # fp32 (6e-8) then leaves three digits of the least certain direction; the sum of eigenvalues over the damping bounds the condition number
RESIDUAL = 0.75  # KL divergence of stories15M with 0, .5, .75 and, of more text, 1: .0347, .0333, .0333; .0280, .0266, .0263, .0262
BLOCK = 128  # columns whose updates are kept together before they are pushed on in one matrix product
_DAMPING_FACTOR, _DAMPING_LIMIT = 10.0, 100.0
_ENOUGH, _MOST = 8, 100.0  # tokens for each input from which on damping stays as it is; how many times it can become larger


@dataclass(frozen=True, slots=True)
class _Factor:
    """What all linears with the same input share.

    Attributes:
        order: `[I]`, in which columns are solved.
        diagonal: `[I]` fp32, the Hessian's, damped.
        lower: `[I, I]` fp32, U^T in that order; None when there is none at any damping.
        note: what the report should say.
    """

    order: torch.Tensor
    diagonal: torch.Tensor
    lower: torch.Tensor | None
    note: str | None


class GPTQ:
    """Second-order rounding with a calibration Hessian."""

    name = "gptq"

    def needs(self, options: Options) -> frozenset[str]:
        """The Hessian and, to correct for earlier errors, its counterpart with the unquantized model."""
        return frozenset({"hessian"} | ({"cross"} if options.error_correction else set()) | ({"outputs"} if options.fisher and options.refine else set()))

    def supports(self, scheme: Scheme) -> str | None:
        """Every scheme that there is arithmetic for; the error feedback is on weights, whatever happens to activations."""
        return numerics.undefined(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options, reach: float = 0.0) -> tuple[QuantizedLinear, str | None]:
        """See `Quantizer.quantize`; `stats.hessian` is `[I, I]`.

        A column that calibration never excited is rounded to nearest. A Hessian that stays indefinite after raising the damping tenfold
        up to a hundred times its mean diagonal makes the whole layer round to nearest; the note says so.
        """
        check_finite(weight)
        if stats is None or stats.tokens == 0:
            return _nearest(weight, scheme, None, options, reach), "calibration never reached this layer: rounded to nearest"
        assert stats.hessian is not None
        factor = _shared_factor(stats, options)
        if factor.lower is None:
            return _nearest(weight, scheme, stats.hessian.diagonal(), options, reach), factor.note
        target = weight if stats.cross is None else _corrected(weight, stats.cross, stats.residual, factor)
        scale, zero = scales.choose(target, scheme, stats.hessian.diagonal(), options.scale_search, reach)
        upper = numerics.super_scales(target, scheme, reach)
        q = QuantizedLinear(scheme, _solve(target, scheme, scale, zero, factor.order, factor.lower), scale, zero, super_scales=upper)
        if options.refine and refine.applies(scheme):
            with stats.clock.part("refine"), _damped(stats.hessian, factor) as hessian:
                q = _refined(target, q, hessian, stats.outputs, options.refine)
        return q, factor.note


def _refined(target: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, outputs: torch.Tensor | None, sweeps: int) -> QuantizedLinear:
    if outputs is None or not coupled.applies(q.scheme):
        return refine.refine(target, q, hessian, sweeps)
    return coupled.refine(target, refine.refine(target, q, hessian, 1), hessian, coupled.damped(outputs), sweeps)


def _nearest(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None, options: Options, reach: float) -> QuantizedLinear:
    scale, zero = scales.choose(weight, scheme, importance, options.scale_search, reach)
    return numerics.quantize(weight, scheme, scale, zero, upper=numerics.super_scales(weight, scheme, reach))


def _corrected(weight: torch.Tensor, cross: torch.Tensor, residual: torch.Tensor | None, factor: _Factor) -> torch.Tensor:
    """The weight `[O, I]` whose outputs on the quantized model's inputs are nearest to the unquantized model's; H^-1 is L L^T of the shared factor."""
    assert factor.lower is not None
    change, lacking = torch.empty_like(weight), weight @ cross
    if residual is not None:
        lacking.add_(residual * (weight != 0).any(1, keepdim=True), alpha=RESIDUAL)  # an output that was taken out stays out
    change[:, factor.order] = (lacking[:, factor.order] @ factor.lower) @ factor.lower.T
    return weight + change


def _shared_factor(stats: Stats, options: Options) -> _Factor:
    key = (options.damping, options.act_order)
    if key not in stats.factors:
        assert stats.hessian is not None
        stats.factors[key] = _factorize(stats.hessian, stats.tokens, options)
    factor = stats.factors[key]
    assert isinstance(factor, _Factor)
    return factor


def damping_for(tokens: int, in_features: int, damping: float) -> float:
    """The part of the mean Hessian diagonal that is added to the diagonal of a Hessian of so many tokens, for `Options.damping`."""
    return damping * min(max(1.0, _ENOUGH * in_features / tokens), _MOST)


def _factorize(hessian: torch.Tensor, tokens: int, options: Options) -> _Factor:
    diagonal = hessian.diagonal()
    if not torch.isfinite(diagonal).all():
        raise NumericalError("the calibration activations are NaN or infinite; the model overflows on this text")
    dead = diagonal == 0
    order = torch.argsort(diagonal, descending=True, stable=True) if options.act_order else torch.arange(len(diagonal))
    notes = [f"{int(dead.sum())} inputs never excited by calibration were rounded to nearest"] if dead.any() else []
    mean = float(diagonal[~dead].double().mean()) if not dead.all() else 1.0
    damping = first = damping_for(tokens, len(diagonal), options.damping)
    while damping <= max(first, _DAMPING_LIMIT):
        damped = diagonal + torch.where(dead, mean, damping * mean)
        lower = _inverse_factor(hessian, order, damped, float(damped.double().sum()) / (damping * mean)) if damped.isfinite().all() else None
        if lower is not None:
            if damping != first:
                notes.append(f"damping raised to {damping:g} to keep the Hessian positive definite")
            return _Factor(order, damped, lower, "; ".join(notes) or None)
        damping = max(damping, 1e-4) * _DAMPING_FACTOR
    notes.append("the Hessian is not positive definite at any damping: rounded to nearest")
    return _Factor(order, diagonal.clone(), None, "; ".join(notes))


def _inverse_factor(hessian: torch.Tensor, order: torch.Tensor, diagonal: torch.Tensor, condition: float) -> torch.Tensor | None:
    """The factor, in fp32 where a bound of the condition number says that this is enough, and it is."""
    lower = inverse_factor(hessian, order, diagonal, torch.float32) if condition < WELL_CONDITIONED else None
    return inverse_factor(hessian, order, diagonal) if lower is None else lower


@contextlib.contextmanager
def _damped(hessian: torch.Tensor, factor: _Factor) -> Iterator[torch.Tensor]:
    """The damped Hessian for a while, in the memory of the plain one."""
    plain = hessian.diagonal().clone()
    hessian.diagonal().copy_(factor.diagonal)
    try:
        yield hessian
    finally:
        hessian.diagonal().copy_(plain)


def _solve(weight: torch.Tensor, scheme: Scheme, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Codes `[O, I]` in the original column order."""
    in_features = weight.shape[1]
    ordered_IO = weight[:, order].T.contiguous()  # a column of the weight is one contiguous row
    if native.runs(scheme):
        group = (order // scheme.granularity.group_size(in_features) if scale.shape[1] > 1 else torch.zeros_like(order)).int()
        codes_IO = native.gptq_solve(lower, ordered_IO, scale, zero, group, scheme)
    else:
        codes_IO = _solve_in_torch(ordered_IO, scheme, scale, zero, order, lower)
    codes = torch.empty(weight.shape, dtype=codes_IO.dtype)
    codes[:, order] = codes_IO.T
    return codes


def _solve_in_torch(remaining: torch.Tensor, scheme: Scheme, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The column loop for every scheme: `remaining [I, O]` is used up, codes `[I, O]` come out, both in the order of solving."""
    in_features, out_features = remaining.shape

    def per_column(values: torch.Tensor) -> torch.Tensor:
        full = numerics.expand(values, scheme, out_features, in_features).expand(out_features, in_features)
        return full[:, order].T.contiguous()

    scale_IO = per_column(scale)
    zero_IO = None if zero is None else per_column(zero)
    codes_IO = torch.empty(in_features, out_features, dtype=code_dtype(scheme))
    for start in range(0, in_features, BLOCK):
        end = min(start + BLOCK, in_features)
        errors = torch.empty(end - start, out_features)
        for j in range(start, end):
            zero_O = None if zero_IO is None else zero_IO[j]
            codes_IO[j] = numerics.encode(remaining[j], scale_IO[j], zero_O, scheme)
            error = (remaining[j] - numerics.decode(codes_IO[j], scale_IO[j], zero_O, scheme)) / lower[j, j]
            errors[j - start] = error
            if j + 1 < end:
                remaining[j + 1 : end].addr_(lower[j + 1 : end, j], error, alpha=-1)
        if end < in_features:
            remaining[end:].addmm_(lower[end:, start:end], errors, alpha=-1)
    return codes_IO
