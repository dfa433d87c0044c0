"""THE reference: quantize, dequantize and the quantized linear in plain PyTorch. Every rounding and clamping rule of qforge is written here, once.

Letters: O output features, I input features, R x C shape of the scales, T tokens.

Rounding is to nearest, ties to even (`torch.round`), on the exactly stored scale: scales are rounded to their stored type *before* codes are chosen.
"""

from __future__ import annotations

import itertools

import torch

from qforge.errors import NumericalError, UnsupportedError
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Number, Per, ScaleType, Scheme, Symmetry

_FLOAT_TYPES = {Number.FP8_E4M3: torch.float8_e4m3fn, Number.FP8_E5M2: torch.float8_e5m2}
_CODE_BOOKS: dict[Number, tuple[float, ...]] = {
    # QLoRA (arXiv 2305.14314), appendix E: quantiles of a normal distribution, zero included.
    Number.NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # OCP Microscaling Formats v1.0, section 5.3.3: E2M1, sign in the top bit.
    Number.FP4_E2M1: (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip
SMALLEST_SCALE = 2.0**-24  # the smallest positive fp16; all-zero groups get scale 1 instead


def round_scale(scale: torch.Tensor, scale_type: ScaleType) -> torch.Tensor:
    """Round positive fp32 scales to values that are exact in `scale_type`; a result of zero becomes the smallest positive value.

    Raises:
        NumericalError: a scale is not finite in the type in which it will be stored.
    """
    if scale_type is ScaleType.F16BF16:
        # bf16 keeps 8 significant bits; below fp16's normal range fp16 keeps fewer, so this order is exact in both.
        rounded = scale.to(torch.bfloat16).to(torch.float16).float()
    elif scale_type is ScaleType.F16:
        rounded = scale.to(torch.float16).float()
    elif scale_type is ScaleType.BF16:
        rounded = scale.to(torch.bfloat16).float()
    elif scale_type is ScaleType.F32:
        return scale.float()
    elif scale_type is ScaleType.E8M0:
        return torch.exp2(torch.ceil(torch.log2(scale)).clamp(-127, 127))
    elif scale_type is ScaleType.E4M3:
        rounded = scale.to(torch.float8_e4m3fn).float()
    else:
        raise UnsupportedError(f"scales of type {scale_type} are not available yet")
    if not torch.isfinite(rounded).all():
        raise NumericalError(
            f"a scale of {scale[~torch.isfinite(rounded)][0].item():.3g} does not fit into {scale_type}; quantize this layer per smaller group, or use @f32 scales"
        )
    return torch.where(rounded == 0, torch.full_like(rounded, SMALLEST_SCALE if scale_type is not ScaleType.E4M3 else 2.0**-9), rounded)


def groups(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """View a weight `[O, I]` as `[R, C, elements]`: the elements that share one scale, in the last dimension."""
    out_features, in_features = weight.shape
    rows, columns = scheme.scale_shape(out_features, in_features)
    if scheme.granularity.per is Per.BLOCK:
        g = scheme.granularity
        padded = torch.nn.functional.pad(weight, (0, columns * g.columns - in_features, 0, rows * g.rows - out_features))
        return padded.view(rows, g.rows, columns, g.columns).transpose(1, 2).reshape(rows, columns, -1)
    return weight.reshape(rows, columns, -1)


def expand(per_group: torch.Tensor, scheme: Scheme, out_features: int, in_features: int, group_index: torch.Tensor | None = None) -> torch.Tensor:
    """Spread `[R, C]` values over the elements they belong to: `[O, I]` (or a shape that broadcasts to it)."""
    if scheme.granularity.per is Per.BLOCK:
        g = scheme.granularity
        return per_group.repeat_interleave(g.rows, 0)[:out_features].repeat_interleave(g.columns, 1)[:, :in_features]
    if group_index is not None:
        return per_group[:, group_index.long()]
    if scheme.granularity.per is Per.GROUP:
        return per_group.repeat_interleave(scheme.granularity.columns, 1)
    return per_group


def largest(scheme: Scheme) -> float:
    """The largest magnitude that a code can stand for at scale 1. Symmetric integers: half of the number of steps, so 7.5 for int4, which uses both ends of -8..7."""
    if scheme.number in _FLOAT_TYPES:
        return float(torch.finfo(_FLOAT_TYPES[scheme.number]).max)
    if scheme.number in _CODE_BOOKS:
        return max(_CODE_BOOKS[scheme.number])
    return ((1 << scheme.bits) - 1) / 2


def minmax_parameters(weight: torch.Tensor, scheme: Scheme, shrink: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales `[R, C]` fp32 and zeros (see `QuantizedLinear`) from the range of each group, the range first multiplied by `shrink` (broadcast to `[R, C]`)."""
    grouped = groups(weight.float(), scheme)
    if scheme.symmetric:
        scale = grouped.abs().amax(-1) * shrink / largest(scheme)
        return round_scale(torch.where(scale == 0, torch.ones_like(scale), scale), scheme.scale.type), None
    low, high = (grouped.amin(-1) * shrink).clamp(max=0), (grouped.amax(-1) * shrink).clamp(min=0)
    steps = float((1 << scheme.bits) - 1)
    scale = (high - low) / steps
    scale = round_scale(torch.where(scale == 0, torch.ones_like(scale), scale), scheme.scale.type)
    if scheme.symmetry is Symmetry.OFFSET:
        return scale, -round_scale(torch.where(low == 0, torch.ones_like(low), -low), scheme.scale.type) * (low != 0)
    return scale, (-low / scale).round().clamp(0, steps).to(torch.uint8)


def encode(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """Nearest codes for `weight` given *broadcastable* scales and zeros, in the dtype of `QuantizedLinear.codes`."""
    if scheme.number in _FLOAT_TYPES:
        kind = _FLOAT_TYPES[scheme.number]
        return (weight / scale).clamp(-largest(scheme), largest(scheme)).to(kind).view(torch.uint8)
    if scheme.number in _CODE_BOOKS:
        return _nearest_in_book(weight / scale, scheme.number)
    low, high = scheme.code_range
    if scheme.symmetry is Symmetry.OFFSET and zero is not None:
        weight, zero = weight - zero, None
    codes = torch.round(weight / scale)
    if zero is not None:
        codes = codes + zero
    return codes.clamp(low, high).to(code_dtype(scheme))


def _nearest_in_book(x: torch.Tensor, number: Number) -> torch.Tensor:
    book = _CODE_BOOKS[number]
    values = sorted(set(book))  # 0.0 == -0.0: the positive zero is met first in every book
    codes = torch.tensor([book.index(v) for v in values], dtype=torch.uint8)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    return codes[torch.bucketize(x.contiguous(), middles)]


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """fp32 values of codes, given broadcastable scales and zeros."""
    if scheme.number in _FLOAT_TYPES:
        return codes.view(_FLOAT_TYPES[scheme.number]).float() * scale
    if scheme.number in _CODE_BOOKS:
        return torch.tensor(_CODE_BOOKS[scheme.number])[codes.long()] * scale
    if scheme.symmetry is Symmetry.OFFSET and zero is not None:
        return codes.float() * scale + zero
    return (codes.float() - zero.float() if zero is not None else codes.float()) * scale


def quantize(
    weight: torch.Tensor, scheme: Scheme, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, group_index: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> QuantizedLinear:
    """Round a weight `[O, I]` to the nearest representable values, given final scales and zeros `[R, C]`."""
    out_features, in_features = weight.shape
    scale = expand(scales, scheme, out_features, in_features, group_index)
    zero = None if zeros is None else expand(zeros, scheme, out_features, in_features, group_index)
    return QuantizedLinear(scheme, encode(weight.float(), scale, zero, scheme), scales, zeros, group_index, bias=bias)


def dequantize(q: QuantizedLinear) -> torch.Tensor:
    """The fp32 weight `[O, I]` (or `[E, O, I]`) that the codes stand for."""
    if q.codes.dim() == 3:
        parts = []
        for e in range(q.codes.shape[0]):
            zero = None if q.zeros is None else expand(q.zeros[e], q.scheme, q.out_features, q.in_features, q.group_index)
            parts.append(decode(q.codes[e], expand(q.scales[e], q.scheme, q.out_features, q.in_features, q.group_index), zero, q.scheme))
        return torch.stack(parts)
    scale = expand(q.scales, q.scheme, q.out_features, q.in_features, q.group_index)
    zero = None if q.zeros is None else expand(q.zeros, q.scheme, q.out_features, q.in_features, q.group_index)
    return decode(q.codes, scale, zero, q.scheme)


def quantize_activations(x: torch.Tensor, scheme: Scheme, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round activations `[..., I]` as the scheme says and return them dequantized (fp32); unchanged when the scheme leaves them alone."""
    a = scheme.activations
    if a is None:
        return x
    kind = Scheme(a.number, a.granularity, scale=type(scheme.scale)(ScaleType.F32))
    x = x.float()
    if a.static:
        if static_scale is None:
            raise UnsupportedError("a static activation scheme needs a calibrated input scale")
        scale = static_scale
    else:
        amount = x.abs().amax(-1, keepdim=True)
        if a.granularity.per is Per.GROUP:
            size = a.granularity.columns
            amount = x.abs().reshape(*x.shape[:-1], -1, size).amax(-1).repeat_interleave(size, -1)
        if a.granularity.per is Per.TENSOR:
            amount = x.abs().amax()
        scale = amount / (largest(kind) if not a.number.is_int else 2.0 ** (a.number.bits - 1) - 1)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return decode(encode(x, scale, None, kind), scale, None, kind)


def linear(x: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    """The reference product: `x [..., I] -> [..., O]` in x's dtype, computed in fp32."""
    y = quantize_activations(x, q.scheme, q.input_scale).float() @ dequantize(q).T
    if q.bias is not None:
        y = y + q.bias.float()
    return y.to(x.dtype)
