"""Weights to GGUF's block types by search: codes, integer scales and minima, and their fp16 scales, chosen together for the least weighted squared error.

First every group alone: scales (and minima) of a grid over how far the range is clipped, each improved by weighted least squares on its codes. Then, where scales are integers
themselves, a block as a whole: the fp16 scale that the groups' scales fit best, and sweeps of descent in which every group tries the neighbours of its integers with codes rounded
anew, and the block solves for its fp16 scales. What a step finds is kept only where the error really falls.

The objective is sum_i h_i (w_i - v_i)^2 over the inputs i of a row, h_i the mean square of input i: the error of the output if inputs are uncorrelated.

Letters: O output features, I input features, N blocks, S groups of a block, G inputs of a group, M = N * S.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from qforge.errors import NumericalError
from qforge.superblocks import TYPES, BlockType, Superblocks

_CHUNK = 1 << 16  # weights worked on at once: their temporaries stay within the second-level cache
_SWEEPS = 2  # of the descent over a block
_REACH = [i / 6 for i in range(-15, 16)]  # how far beyond the last code the largest weight is put, in steps (in twelfths of the range where that is more)
_TOPS, _BOTTOMS = [i / 4 for i in range(-4, 7)], (-0.4, 0.0, 0.4, 0.8, 1.2)  # the same with minima, for the highest weight and the lowest
_LARGEST = 65504.0  # of fp16
_LEAST = 1e-6  # importance of an input that calibration never saw, as a share of the mean: its weights still choose the nearest code


@dataclass(slots=True)
class _Fit:
    """Of every group: `value = scale * code + low`, and the weighted squared error; all `[M]`."""

    scale: torch.Tensor
    low: torch.Tensor
    error: torch.Tensor

    def keep(self, other: _Fit) -> None:
        """Take over the groups in which the other is better."""
        better = other.error < self.error
        for mine, theirs in ((self.scale, other.scale), (self.low, other.low), (self.error, other.error)):
            torch.where(better, theirs, mine, out=mine)


def quantize(weight: torch.Tensor, importance: torch.Tensor | None, kind: str) -> Superblocks:
    """Quantize a weight `[O, I]` to a block type.

    Args:
        weight: any float type.
        importance: of each input `[I]`, at least 0; None weighs all alike.
        kind: name of the type, whose block divides I.

    Returns:
        Its O * I / block blocks, row after row.
    Raises:
        NumericalError: a weight is not finite, or too large for an fp16 scale.
    """
    t = TYPES[kind]
    if not weight.isfinite().all():
        raise NumericalError("a weight is NaN or infinite")
    peak = float(weight.abs().max())
    if peak > _LARGEST * max(map(abs, t.codes)) * (1 if t.scales is None else max(map(abs, t.scales))):
        raise NumericalError(f"a weight of {peak:.3g} needs a larger scale than fp16 holds, which ends at {_LARGEST:.0f}")
    h = torch.ones(weight.shape[1]) if importance is None else importance.float()
    mean = h.mean()
    h = torch.ones_like(h) if not mean > 0 else (h / mean).clamp(min=_LEAST)
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [_chunk(part.float(), h, t) for part in weight.split(rows)]
    return Superblocks(t, *(None if p[0] is None else torch.cat(p) for p in zip(*parts, strict=True)))  # type: ignore[arg-type]


def _chunk(weight: torch.Tensor, h: torch.Tensor, t: BlockType) -> tuple[torch.Tensor | None, ...]:
    """The fields of the blocks of some rows, in the order of `Superblocks`."""
    x = weight.reshape(-1, t.group).T.contiguous()  # [G, M]: sums over a group run along whole vectors
    w = h.expand_as(weight).reshape(-1, t.group).T.contiguous()
    fit = _offset_fit(x, w, t) if t.minimum else _symmetric_fit(x, w, t)
    if t.scales is None:
        d, low = _fp16(fit.scale), _fp16(fit.low) if t.minimum else None
        codes = _codes(x, d.float(), 0 if low is None else low.float(), t)
        return _blocks(codes, t), d, None, low, None
    state = _descend(x, w, _integers(x, w, fit, t), t)
    codes = _codes(x, *state.spread(), t)
    minima = None if state.dmin is None or state.minima is None else state.minima.to(torch.int16)
    return _blocks(codes, t), state.d.to(torch.float16), state.scales.to(torch.int16), None if state.dmin is None else state.dmin.to(torch.float16), minima


def _blocks(codes: torch.Tensor, t: BlockType) -> torch.Tensor:
    """Codes `[G, M]` as int16 `[N, S, G]`."""
    return codes.T.to(torch.int16).reshape(-1, t.groups, t.group)


def _fp16(values: torch.Tensor) -> torch.Tensor:
    if (values.abs() > _LARGEST).any():
        raise NumericalError(f"weights need a scale of {float(values.abs().max()):.3g}, and fp16 ends at {_LARGEST:.0f}")
    return values.to(torch.float16)


def _codes(x: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | float, t: BlockType) -> torch.Tensor:
    """The nearest codes `[G, M]`; 0, or the code nearest to it, where the scale is 0."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return (x - low).mul_(inverse).round_().clamp_(*t.codes)


def _error(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | float, t: BlockType) -> torch.Tensor:
    """Weighted squared error `[M]` of the nearest codes."""
    wrong = _codes(x, scale, low, t).mul_(-scale).add_(x).sub_(low)
    return wrong.square_().mul_(w).sum(0)


def _symmetric_fit(x: torch.Tensor, w: torch.Tensor, t: BlockType) -> _Fit:
    """The largest weight goes near either end of the codes, which differ by one; scales by least squares."""
    wx = w * x
    squares = (wx * x).sum(0)
    peak = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    best = _Fit(torch.zeros_like(squares), torch.zeros_like(squares), squares.clone())
    for end in _ends(t):
        best.keep(_least_squares(x, w, wx, squares, torch.where(peak == 0, 0.0, end / peak), t))
    best.error = _error(x, w, best.scale, 0.0, t)
    for _ in range(2):
        best.keep(_measured_fit(x, w, _least_squares(x, w, wx, squares, torch.where(best.scale == 0, 0.0, 1 / best.scale), t), t))
    return best


def _measured_fit(x: torch.Tensor, w: torch.Tensor, fit: _Fit, t: BlockType) -> _Fit:
    """The fit with the error of the codes that it will have: sums tell that of the old codes, and cancel where a fit is nearly exact."""
    return _Fit(fit.scale, fit.low, _error(x, w, fit.scale, fit.low, t))


def _ends(t: BlockType) -> list[float]:
    """Where the largest weight of a group is put, in steps: beyond the last code it is clipped."""
    low, high = t.codes
    return [sign * (end + more * max(1.0, end / 12)) for sign, end in ((-1, -low), (1, high)) for more in _REACH]


def _least_squares(x: torch.Tensor, w: torch.Tensor, wx: torch.Tensor, squares: torch.Tensor, inverse: torch.Tensor, t: BlockType) -> _Fit:
    """The scale that fits the codes which `inverse` `[M]` gives best."""
    q = (x * inverse).round_().clamp_(*t.codes)
    along = (wx * q).sum(0)
    own = q.square_().mul_(w).sum(0)
    scale = along / own.clamp(min=1e-30)
    return _Fit(scale, torch.zeros_like(scale), squares - along * scale)


def _offset_fit(x: torch.Tensor, w: torch.Tensor, t: BlockType) -> _Fit:
    """Ranges clipped by shares of a step at the top and at the bottom; scale and minimum by least squares. A minimum that is an integer is subtracted, so it is at most 0."""
    wx = w * x
    sums = (w.sum(0), wx.sum(0), (wx * x).sum(0))
    free = t.scales is None
    low, high = x.amin(0), x.amax(0)
    if not free:
        low, high = low.clamp(max=0), high.clamp(min=0)
    span = high - low
    best = _Fit(torch.zeros_like(span), torch.zeros_like(span), sums[2].clone())
    top = t.codes[1]
    for more, less in itertools.product(_TOPS, _BOTTOMS):
        inverse = torch.where(span == 0, 0.0, (top + more + less) / span)
        best.keep(_two_least_squares(x, w, wx, sums, inverse, low * inverse + less, t, free))
    best.error = _error(x, w, best.scale, best.low, t)
    for _ in range(3):
        inverse = torch.where(best.scale == 0, 0.0, 1 / best.scale)
        best.keep(_measured_fit(x, w, _two_least_squares(x, w, wx, sums, inverse, best.low * inverse, t, free), t))
    return best


def _two_least_squares(
    x: torch.Tensor, w: torch.Tensor, wx: torch.Tensor, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor], inverse: torch.Tensor, start: torch.Tensor, t: BlockType, free: bool
) -> _Fit:
    """Scale and minimum that fit the codes round(x * inverse - start) best; `sums` of w, w x and w x^2."""
    q = (x * inverse).sub_(start).round_().clamp_(*t.codes)
    along = (wx * q).sum(0)
    wq = w * q
    first, second = wq.sum(0), wq.mul_(q).sum(0)
    determinant = sums[0] * second - first * first
    sound = determinant > 1e-6 * sums[0] * second
    scale = torch.where(sound, (sums[0] * along - sums[1] * first) / determinant, 0.0)
    low = torch.where(sound, (second * sums[1] - first * along) / determinant, sums[1] / sums[0])
    if not free:
        above = low > 0
        scale, low = torch.where(above, along / second.clamp(min=1e-30), scale), low.clamp(max=0)
    return _Fit(scale, low, sums[2] - scale * along - low * sums[1])


@dataclass(slots=True)
class _State:
    """Blocks whose scales are integers: `d`, `dmin` fp32 `[N]` (exact in fp16), `scales`, `minima` fp32 `[N, S]` (integers), and the error `[N, S]`."""

    d: torch.Tensor
    scales: torch.Tensor
    dmin: torch.Tensor | None
    minima: torch.Tensor | None
    error: torch.Tensor

    def spread(self) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Scale and minimum of every group, `[M]`."""
        low = 0.0 if self.dmin is None or self.minima is None else (-self.dmin[:, None] * self.minima).flatten()
        return (self.d[:, None] * self.scales).flatten(), low

    def keep(self, other: _State) -> None:
        """Take over the blocks in which the other is better."""
        better = other.error.sum(1) < self.error.sum(1)
        self.d = torch.where(better, other.d, self.d)
        pairs = [(self.scales, other.scales), (self.error, other.error)]
        if self.dmin is not None and other.dmin is not None and self.minima is not None and other.minima is not None:
            self.dmin = torch.where(better, other.dmin, self.dmin)
            pairs.append((self.minima, other.minima))
        for mine, theirs in pairs:
            torch.where(better[:, None], theirs, mine, out=mine)


def _measured(x: torch.Tensor, w: torch.Tensor, state: _State, t: BlockType) -> _State:
    state.error = _error(x, w, *state.spread(), t).view(state.scales.shape)
    return state


def _integers(x: torch.Tensor, w: torch.Tensor, fit: _Fit, t: BlockType) -> _State:
    """The groups' scales, and minima, as integers under one fp16 scale each."""
    assert t.scales is not None
    q = _codes(x, fit.scale, fit.low, t)
    second = q.square_().mul_(w).sum(0)
    d, scales = _common(fit.scale.view(-1, t.groups), second.view(-1, t.groups), t.scales)
    if not t.minimum:
        return _measured(x, w, _State(d, scales, None, None, scales), t)
    dmin, minima = _common(-fit.low.view(-1, t.groups), w.sum(0).view(-1, t.groups), t.scales)
    return _measured(x, w, _State(d, scales, dmin, minima, scales), t)


def _common(values: torch.Tensor, weights: torch.Tensor, limits: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp16 number `[N]` whose integer multiples are nearest to `values` `[N, S]`, by weighted least squares over a grid, and the integers `[N, S]`."""
    low, high = limits
    peak = values.gather(1, values.abs().argmax(1, keepdim=True))[:, 0]
    best_d, best_error = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    steps = [high - share * high for share in (0.0, 0.01, 0.025, 0.04, 0.06, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3)]
    for end in [*steps, *(-s for s in steps if low < 0), *([float(low)] if low < 0 else [])]:
        d = _fp16(peak / end).float()
        for _ in range(2):
            inverse = torch.where(d == 0, 0.0, 1 / d)
            k = (values * inverse[:, None]).round_().clamp_(low, high)
            error = (values - d[:, None] * k).square_().mul_(weights).sum(1)
            better = error < best_error
            best_d, best_error = torch.where(better, d, best_d), torch.where(better, error, best_error)
            d = _fp16((values * k * weights).sum(1) / (k * k * weights).sum(1).clamp(min=1e-30)).float()
    inverse = torch.where(best_d == 0, 0.0, 1 / best_d)
    return best_d, (values * inverse[:, None]).round_().clamp_(low, high)


def _descend(x: torch.Tensor, w: torch.Tensor, state: _State, t: BlockType) -> _State:
    for _ in range(_SWEEPS):
        _try_neighbours(x, w, state, t)
        state.keep(_measured(x, w, _solved(x, w, state, t), t))
    _try_neighbours(x, w, state, t)
    return state


def _try_neighbours(x: torch.Tensor, w: torch.Tensor, state: _State, t: BlockType) -> None:
    """Each group's integers one lower and one higher, with codes rounded anew; in place."""
    assert t.scales is not None
    low, high = t.scales
    scales, minima = state.scales.clone(), None if state.minima is None else state.minima.clone()
    for ds, dm in itertools.product((0, -1, 1), (0,) if minima is None else (0, -1, 1)):
        if ds == dm == 0:
            continue
        s = (scales + ds).clamp_(low, high)
        m = None if minima is None else (minima + dm).clamp_(0, high)
        tried = _measured(x, w, _State(state.d, s, state.dmin, m, state.error), t)
        better = tried.error < state.error
        torch.where(better, s, state.scales, out=state.scales)
        if m is not None and state.minima is not None:
            torch.where(better, m, state.minima, out=state.minima)
        state.error = torch.where(better, tried.error, state.error)


def _solved(x: torch.Tensor, w: torch.Tensor, state: _State, t: BlockType) -> _State:
    """The fp16 scales that fit codes and integers best, by least squares over the block."""
    shape = state.scales.shape
    q = _codes(x, *state.spread(), t)
    wq = w * q
    along, first = (wq * x).sum(0).view(shape), wq.sum(0).view(shape)
    second = wq.mul_(q).sum(0).view(shape)
    uu, ux = (state.scales.square() * second).sum(1), (state.scales * along).sum(1)
    if state.dmin is None or state.minima is None:
        d = torch.where(uu > 0, ux / uu, state.d)
        return _State(_fp16(d).float(), state.scales.clone(), None, None, state.error)
    uv = (state.scales * state.minima * first).sum(1)
    vv = (state.minima.square() * w.sum(0).view(shape)).sum(1)
    vx = (state.minima * (w * x).sum(0).view(shape)).sum(1)
    determinant = uu * vv - uv * uv
    sound = determinant > 1e-6 * uu * vv
    d = torch.where(sound, (ux * vv - uv * vx) / determinant, state.d)
    dmin = torch.where(sound, (uv * ux - uu * vx) / determinant, state.dmin)
    sound = (d > 0) & (dmin >= 0)
    d, dmin = torch.where(sound, d, state.d), torch.where(sound, dmin, state.dmin)
    return _State(_fp16(d).float(), state.scales.clone(), _fp16(dmin).float(), state.minima.clone(), state.error)
