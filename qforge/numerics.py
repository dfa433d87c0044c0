"""THE reference: quantize, dequantize and the quantized linear in plain PyTorch. Every rounding and clamping rule of qforge is written here, once.

Letters: O output features, I input features, R x C shape of the scales, T tokens.

Rounding is to nearest, ties to even (`torch.round`), on the exactly stored scale: scales are rounded to their stored type *before* codes are chosen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from qforge.errors import NumericalError, UnsupportedError
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Granularity, Number, Per, ScaleType, Scheme, Symmetry

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
_SCALE_DTYPES = {ScaleType.F16: torch.float16, ScaleType.BF16: torch.bfloat16, ScaleType.F32: torch.float32, ScaleType.E4M3: torch.float8_e4m3fn}
_MXFP4_CLIP = 6 / 7  # up to 7 is clipped to 6 rather than given twice the scale, as compressed-tensors does: KL divergence .158 on stories15M; .165 unclipped, .180 up to 8 (OCP)
_SMALLEST_POSITIVE = {ScaleType.F32: 2.0**-149, ScaleType.E4M3: 2.0**-9}


def undefined(scheme: Scheme) -> str | None:
    """None, or why there is no arithmetic for a scheme: its scales' second level, or how its activations are rounded."""
    upper, first, a = scheme.scale.super_granularity, scheme.scale.type, scheme.activations
    second = None if upper is None else (first, upper.per)
    if second not in (None, (ScaleType.E4M3, Per.TENSOR), (ScaleType.U8, Per.GROUP), (ScaleType.U6, Per.GROUP)) or (second is None and first in (ScaleType.U6, ScaleType.U8)):
        return f"scales of type {scheme.scale} are not defined; two-level scales are @e4m3/tensor:f32 (NVFP4), @u8/g256:f32 (double quantization) and @u6/g256:f16"
    if upper is not None and scheme.granularity.per is not Per.GROUP:
        return "two-level scales need weights in groups"
    if upper is not None and (scheme.scale.super_type is ScaleType.F32) != (first is not ScaleType.U6):
        return f"a second level over {first} scales is {'f16' if first is ScaleType.U6 else 'f32'}, not {scheme.scale.super_type}"
    if first is ScaleType.U8 and not scheme.symmetric:
        return "double quantization (@u8) is for symmetric schemes"
    if first is ScaleType.U6 and upper is not None and upper.columns % scheme.granularity.columns:
        return f"second-level scales of {upper.columns} inputs do not hold whole groups of {scheme.granularity.columns}"
    if a is None:
        return None
    if a.number not in (Number.INT8, Number.FP8_E4M3):
        return f"activations are rounded to int8 or fp8-e4m3, not {a.number}"
    if a.static and a.granularity.per is not Per.TENSOR:
        return "a static activation scale is one for the tensor (-tensor-static)"
    if a.granularity.per is Per.TENSOR and not a.static:
        return "a dynamic activation scale per tensor depends on the whole batch; use -token, or -tensor-static"
    return None


def round_scale(scale: torch.Tensor, scale_type: ScaleType) -> torch.Tensor:
    """Round positive fp32 scales to values that are exact in `scale_type`; a result of zero becomes the smallest positive value.

    E8M0 takes the power of two that is not below the scale, so that nothing is clipped.

    Raises:
        NumericalError: a scale is not finite in the type in which it will be stored.
    """
    if scale_type is ScaleType.E8M0:
        mantissa, exponent = torch.frexp(scale.float())
        return torch.ldexp(torch.ones_like(mantissa), (exponent - (mantissa == 0.5).int()).clamp(-127, 127))
    if scale_type is ScaleType.F16BF16:
        # bf16 keeps 8 significant bits; below fp16's normal range fp16 keeps fewer, so this order is exact in both.
        rounded = scale.to(torch.bfloat16).to(torch.float16).float()
    elif scale_type in _SCALE_DTYPES:
        rounded = scale.to(_SCALE_DTYPES[scale_type]).float()
    else:
        raise UnsupportedError(f"scales of type {scale_type} need a second level")
    if not torch.isfinite(rounded).all():
        raise NumericalError(
            f"a scale of {scale[~torch.isfinite(rounded)][0].item():.3g} does not fit into {scale_type}; quantize this layer per smaller group, or use @f32 scales"
        )
    return torch.where(rounded == 0, torch.full_like(rounded, _SMALLEST_POSITIVE.get(scale_type, SMALLEST_SCALE)), rounded)


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by, rounded once. (By a bare number torch divides so on a processor, while on a GPU it multiplies by the reciprocal, which is off by a bit now and then.)"""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


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


def has_common_scale(scheme: Scheme) -> bool:
    """Whether a weight has a scale for all of it that engines want to be the same number in linears which they fuse: NVFP4's second level, and FP8's only one.

    vLLM keeps the smallest second-level scale of them for all, which changes what the others' codes stand for, and rounds FP8 anew to the largest.
    """
    upper = scheme.scale.super_granularity
    return (upper is not None and upper.per is Per.TENSOR) or (scheme.number in _FLOAT_TYPES and scheme.granularity.per is Per.TENSOR)


def minmax_parameters(weight: torch.Tensor, scheme: Scheme, shrink: torch.Tensor | float = 1.0, reach: float = 0.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales `[R, C]` fp32 and zeros (see `QuantizedLinear`) from the range of each group, the range first multiplied by `shrink` (broadcast to `[R, C]`).

    Scales of two-level schemes are effective ones, on the grid of `super_scales(weight, scheme, reach)`, whatever `shrink` is. Of a scheme that `has_common_scale`, `reach`
    is the largest magnitude that the scale for all of a weight is to be made for; 0 for the weight's own.
    """
    scale, low = _ranges(weight, scheme, shrink)
    if reach and has_common_scale(scheme) and scheme.scale.super_granularity is None:
        scale = _for_reach(scale, scheme, reach)
    upper = super_scales(weight, scheme, reach)
    if low is None:
        return _stored(scale, scheme, upper), None
    if scheme.symmetry is Symmetry.OFFSET:
        of_scales, of_minima = (None, None) if upper is None else (upper[0], upper[1])
        return _stored(scale, scheme, of_scales), -_stored(-low, scheme, of_minima, least=0) * (low != 0)
    scale = _stored(scale, scheme, upper)
    return scale, (-low / scale).round().clamp(0, (1 << scheme.bits) - 1).to(torch.uint8)


def _ranges(weight: torch.Tensor, scheme: Scheme, shrink: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unrounded scales `[R, C]`, and the lowest values (at most 0) where the scheme is not symmetric."""
    grouped = groups(weight.float(), scheme)
    if scheme.symmetric:
        return divided(grouped.abs().amax(-1) * shrink, largest(scheme)), None
    low, high = (grouped.amin(-1) * shrink).clamp(max=0), (grouped.amax(-1) * shrink).clamp(min=0)
    return divided(high - low, float((1 << scheme.bits) - 1)), low


def _for_reach(scale: torch.Tensor, scheme: Scheme, reach: float) -> torch.Tensor:
    """A scale in the shape of this one, which its codes reach so far with; NaN where this one is not finite, for `_stored` to refuse."""
    return scale * 0 + reach / largest(scheme)


def _stored(scale: torch.Tensor, scheme: Scheme, upper: torch.Tensor | None, least: int = 1) -> torch.Tensor:
    """Scales (not negative) as they will be stored; an all-zero group's becomes 1, or the smallest one that its second level has."""
    if scheme.number is Number.FP4_E2M1 and scheme.scale.type is ScaleType.E8M0:
        scale = scale * _MXFP4_CLIP
    if upper is None:
        stored = round_scale(torch.where(scale == 0, torch.ones_like(scale), scale), scheme.scale.type)
    else:
        stored = scales_from_codes(scale_codes(scale, upper, scheme, least), upper, scheme)
    if not torch.isfinite(stored * largest(scheme)).all():
        raise NumericalError(f"weights this large have no scale in {scheme.scale} whose largest code is finite in fp32")
    return stored


def super_scales(weight: torch.Tensor, scheme: Scheme, reach: float = 0.0) -> torch.Tensor | None:
    """The second-level scales (fp32) of a weight `[O, I]`, from the full range of its groups; None for one-level schemes.

    `@e4m3/tensor:f32` (NVFP4) `[1]`: the smallest power of two with which the largest scale is at most 448. To multiply and to divide by it is exact, so that formats that
        keep its reciprocal hold the same numbers, and products of codes and both scales are exact in bf16. With a `reach`, for weights as large as that: what is larger is clipped.
    `@u8/gN:f32` `[B + 1]`: double quantization (QLoRA, arXiv 2305.14314, section 3) as bitsandbytes does it. The mean of all scales is subtracted, and stands last; before it
        the largest magnitude that is left in each N scales, rows following each other.
    `@u6/gN:f16` `[R, C2]`: a 63rd of the largest scale of N inputs; with offsets `[2, R, C2]`, those of the minima second.

    Raises:
        NumericalError: one of them is not finite.
    """
    first, g = scheme.scale.type, scheme.scale.super_granularity
    if g is None:
        return None
    scale, low = _ranges(weight, scheme)
    if first is ScaleType.E4M3:
        top = scale.amax().reshape(1)
        return round_scale(divided(_for_reach(top, scheme, reach) if reach else top, 448.0), ScaleType.E8M0)
    if first is ScaleType.U8:
        mean = scale.double().mean().to(scale.dtype)  # in fp64: else it is another one where sums have another order
        if not torch.isfinite(mean):
            raise NumericalError("the mean of the scales is beyond fp32; these weights are too large for double quantization")
        rest = (scale - mean).flatten()
        of_blocks = torch.nn.functional.pad(rest, (0, -len(rest) % g.columns)).view(-1, g.columns).abs().amax(-1)
        return torch.cat((of_blocks, torch.where(mean == 0, torch.ones_like(mean), mean).reshape(1)))
    parts = scale if low is None or scheme.symmetry is Symmetry.ASYM else torch.stack((scale, -low))
    return round_scale(divided(parts.unflatten(-1, (-1, g.columns // scheme.granularity.columns)).amax(-1), 63.0), ScaleType.F16)


def scale_codes(scale: torch.Tensor, upper: torch.Tensor, scheme: Scheme, least: int = 1) -> torch.Tensor:
    """Nearest first-level codes `[R, C]` of scales `[R, C]`: float8_e4m3fn for `@e4m3`, else uint8. They stand for positive scales (with `least` 0 also for 0)."""
    spread = _spread(upper, scheme, scale.shape)
    if scheme.scale.type is ScaleType.E4M3:
        return round_scale((scale / spread).clamp(max=448), ScaleType.E4M3).to(torch.float8_e4m3fn)
    if scheme.scale.type is ScaleType.U6:
        return (scale / spread).round().clamp(least, 63).to(torch.uint8)
    book = dynamic_code(scale.device)
    scaled = ((scale - upper[-1]) * (1 / spread.clamp(min=1e-38))).clamp(-1, 1)  # bitsandbytes multiplies by the reciprocal
    codes = torch.bucketize(scaled, (book[:-1] + book[1:]) / 2)
    while (lost := scales_from_codes(codes, upper, scheme) <= 0).any():
        codes += lost
    return codes.to(torch.uint8)


def scales_from_codes(codes: torch.Tensor, upper: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The effective scales `[R, C]` fp32 that first-level codes stand for."""
    spread = _spread(upper, scheme, codes.shape)
    return dynamic_code(codes.device)[codes.long()] * spread + upper[-1] if scheme.scale.type is ScaleType.U8 else codes.float() * spread


def _spread(upper: torch.Tensor, scheme: Scheme, shape: torch.Size) -> torch.Tensor:
    """Second-level scales over the `[R, C]` scales that they belong to."""
    g = scheme.scale.super_granularity
    assert g is not None
    if g.per is Per.TENSOR:
        return upper
    if scheme.scale.type is ScaleType.U8:
        return upper[:-1].repeat_interleave(g.columns)[: shape.numel()].view(shape)
    return upper.repeat_interleave(shape[1] // upper.shape[1], 1)


@functools.cache
def dynamic_code(device: torch.device = torch.device("cpu")) -> torch.Tensor:  # noqa: B008
    """The 256 values (fp32, rising) of bitsandbytes' signed dynamic 8-bit type (arXiv 2110.02861, section 2.1): in seven decades 1, 2, .. 64 evenly spaced values, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (1 << decade) + 1, device="cpu")
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values), device=device)


def code_book(number: Number) -> torch.Tensor:
    """`[16]` fp32: what the codes of a 4-bit number type without a uniform grid stand for."""
    return torch.tensor(_CODE_BOOKS[number])


@functools.cache
def _on(number: Number, device: torch.device) -> torch.Tensor:
    """A code book where the codes are. Kept, since a CUDA graph cannot record how it gets there."""
    return code_book(number).to(device)


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
    if number is Number.FP4_E2M1:
        return (torch.bucketize(x.abs().contiguous(), _middles(number, x.device)) + 8 * torch.signbit(x)).to(torch.uint8)
    return torch.bucketize(x.contiguous(), _middles(number, x.device)).to(torch.uint8)


@functools.cache
def _middles(number: Number, device: torch.device) -> torch.Tensor:
    """The values between neighbours of a code book; of its magnitudes for FP4, where a tie goes to the even code and -0.0 keeps its sign, as in the other float types."""
    book = _CODE_BOOKS[number]
    if number is not Number.FP4_E2M1:
        return torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(book)], device=device)
    magnitudes = torch.tensor(book[:8])
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(3))
    return middles.to(device)


def decode(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """fp32 values of codes, given broadcastable scales and zeros."""
    if scheme.number in _FLOAT_TYPES:
        return codes.view(_FLOAT_TYPES[scheme.number]).float() * scale
    if scheme.number in _CODE_BOOKS:
        return _on(scheme.number, codes.device)[codes.long()] * scale
    if scheme.symmetry is Symmetry.OFFSET and zero is not None:
        return codes.float() * scale + zero
    return (codes.float() - zero.float() if zero is not None else codes.float()) * scale


def quantize(
    weight: torch.Tensor,
    scheme: Scheme,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    *,
    upper: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> QuantizedLinear:
    """Round a weight `[O, I]` to the nearest representable values, given final scales and zeros `[R, C]`, and the `upper` scales that two-level ones were made with."""
    out_features, in_features = weight.shape
    scale = expand(scales, scheme, out_features, in_features, group_index)
    zero = None if zeros is None else expand(zeros, scheme, out_features, in_features, group_index)
    return QuantizedLinear(scheme, encode(weight.float(), scale, zero, scheme), scales, zeros, group_index, upper, bias=bias)


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


def activation_scale(amount: torch.Tensor, number: Number) -> torch.Tensor:
    """The fp32 scale that maps magnitudes up to `amount` onto a number type: half of its steps for integers (127.5 for int8), as compressed-tensors has it; 1 for 0."""
    scale = divided(amount, largest(Scheme(number, Granularity(Per.TENSOR))))
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_activations(x: torch.Tensor, scheme: Scheme, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round activations `[..., I]` as the scheme says and return them dequantized (fp32); unchanged when the scheme leaves them alone.

    What is NaN or infinite becomes NaN under a static scale, too, whose codes would make a small number of it: a model that overflows is not to look sound.
    """
    a = scheme.activations
    if a is None:
        return x
    x = x.float()
    if a.static:
        if static_scale is None:
            raise UnsupportedError("a static activation scheme needs a calibrated input scale")
        scale = static_scale
    elif a.granularity.per is Per.GROUP:
        size = a.granularity.columns
        scale = activation_scale(x.abs().unflatten(-1, (-1, size)).amax(-1), a.number).repeat_interleave(size, -1)
    else:
        scale = activation_scale(x.abs().amax() if a.granularity.per is Per.TENSOR else x.abs().amax(-1, keepdim=True), a.number)
    kind = Scheme(a.number, a.granularity)
    rounded = decode(encode(x, scale, None, kind), scale, None, kind)
    return torch.where(x.isfinite(), rounded, torch.nan) if a.static else rounded


def input_rounding(scheme: Scheme | None, static_scale: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a linear of this scheme does to its input before it multiplies; None for one that leaves it alone."""
    if scheme is None or scheme.activations is None:
        return None
    return functools.partial(quantize_activations, scheme=scheme, static_scale=static_scale)


def linear(x: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    """The reference product: `x [..., I] -> [..., O]` in x's dtype, computed in fp32."""
    y = quantize_activations(x, q.scheme, q.input_scale).float() @ dequantize(q).T
    if q.bias is not None:
        y = y + q.bias.float()
    return y.to(x.dtype)
