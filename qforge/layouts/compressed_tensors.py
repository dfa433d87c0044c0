"""The compressed-tensors layout: the tensors of one linear.

Formats (compressed-tensors 0.20, and llm-compressor's checkpoints before it): `pack-quantized` (integers of 2 to 8 bits in int32 words),
`int-quantized` (8-bit integers, with activations that are rounded too), `float-quantized` and `naive-quantized` (FP8),
`nvfp4-pack-quantized` and `mxfp4-pack-quantized` (E2M1 codes two to a byte, the first in the low half; scales in e4m3 over the *reciprocal* of a
scale for the whole tensor, or powers of two as biased exponents).

Letters: O output features, I input features, R x C shape of the scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qforge import numerics
from qforge.errors import ModelError, UnsupportedError
from qforge.layouts.base import expect_finite, expect_group_index, expect_shape, signed, take
from qforge.layouts.bits import pack_nibbles, pack_words, unpack_nibbles, unpack_words, words_for
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

NAME = "compressed-tensors"
SCALE_DTYPES = {ScaleType.F16: torch.float16, ScaleType.BF16: torch.bfloat16, ScaleType.F32: torch.float32}
NVFP4 = ScaleFormat(ScaleType.E4M3, Granularity(Per.TENSOR), ScaleType.F32)
MXFP4 = ScaleFormat(ScaleType.E8M0)
_FP4_FORMATS = {(16, NVFP4): "nvfp4-pack-quantized", (32, MXFP4): "mxfp4-pack-quantized"}  # by group size and scales


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The layout (see `qforge.layouts.base.Layout`).

    Attributes:
        scale_dtype: the dtype in which scales are stored; every scale must be exact in it (`scale_dtype_for` chooses one).
        padded_zeros: store packed zero points with O rows, the unused ones zero, instead of O * bits / 32. compressed-tensors 0.20 makes a
            parameter of O rows when it loads without `dequantize`, and `dequantize` reads every linear with the scheme of the first group
            and drops the rounding of inputs: such a checkpoint loads in transformers only in this form.
    """

    scale_dtype: torch.dtype = torch.float32
    padded_zeros: bool = False
    name: str = NAME

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if scheme.symmetry is Symmetry.OFFSET:
            return "compressed-tensors has integer zero points, no offsets"
        if scheme.number is Number.FP4_E2M1:
            held = scheme.granularity.per is Per.GROUP and (scheme.granularity.columns, scheme.scale) in _FP4_FORMATS
            return None if held else f"compressed-tensors has fp4-e2m1 as NVFP4 (g16@{NVFP4}) and MXFP4 (g32@{MXFP4}), not {scheme.granularity}@{scheme.scale}"
        if not scheme.number.is_int and scheme.number is not Number.FP8_E4M3:
            return f"compressed-tensors has no {scheme.number} weights; it has int2 to int8, fp8-e4m3 and fp4-e2m1"
        if scheme.scale.super_granularity is not None or (scheme.scale.type is not ScaleType.F16BF16 and scheme.scale.type not in SCALE_DTYPES):
            return f"compressed-tensors holds scales of {scheme.number} in f16, bf16 or f32, not {scheme.scale}"
        if scheme.number.is_int and scheme.granularity.per is Per.BLOCK:
            return "compressed-tensors has blocks for fp8 only; integers are per tensor, channel or group"
        return None

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """Codes, scales and zero points by the layout's local names; symmetric codes are stored with an offset where they are packed."""
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        tensors = _pack_fp4(q) if q.scheme.number is Number.FP4_E2M1 else self._pack(q)
        if q.group_index is not None:
            tensors["weight_g_idx"] = q.group_index.to(torch.int32)
        if q.input_scale is not None:
            tensors["input_scale"] = q.input_scale.float().reshape(1)
        return tensors

    def _pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        scale = q.scales.to(self.scale_dtype)
        assert torch.equal(scale.float(), q.scales), f"scales are not exact in {self.scale_dtype}"
        tensors = {"weight_scale": scale.reshape(1) if q.scheme.granularity.per is Per.TENSOR else scale.contiguous()}
        if format_of(q.scheme) == "pack-quantized":
            tensors["weight_packed"] = pack_words(_unsigned(q.codes, q.scheme), q.scheme.bits)
            tensors["weight_shape"] = torch.tensor(q.codes.shape, dtype=torch.int64)
        else:
            tensors["weight"] = q.codes.view(torch.float8_e4m3fn) if not q.scheme.number.is_int else _signed(q.codes, q.scheme)
        if q.zeros is not None:
            tensors["weight_zero_point"] = self._pack_zeros(q.zeros, q.scheme)
        return tensors

    def _pack_zeros(self, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        if not packs_zeros(scheme):
            stored = _signed(zeros, scheme)
            return stored.reshape(1) if scheme.granularity.per is Per.TENSOR else stored
        packed = pack_words(zeros, scheme.bits, dim=0)
        return torch.nn.functional.pad(packed, (0, 0, 0, zeros.shape[0] - packed.shape[0])) if self.padded_zeros else packed

    def infos(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `pack` gives for a weight `[O, I]` with contiguous groups, known before the weight is."""
        rows, columns = scheme.scale_shape(out_features, in_features)
        per_tensor = scheme.granularity.per is Per.TENSOR
        infos: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight_scale": ((1,) if per_tensor else (rows, columns), self.scale_dtype)}
        if scheme.number is Number.FP4_E2M1:
            infos = {"weight_scale": ((rows, columns), torch.float8_e4m3fn if scheme.scale == NVFP4 else torch.uint8)}
            infos["weight_packed"] = (out_features, in_features // 2), torch.uint8
            infos |= {"weight_global_scale": ((1,), torch.float32)} if scheme.scale == NVFP4 else {}
        elif format_of(scheme) == "pack-quantized":
            infos["weight_packed"] = (out_features, words_for(in_features, scheme.bits)), torch.int32
            infos["weight_shape"] = (2,), torch.int64
        else:
            infos["weight"] = (out_features, in_features), torch.int8 if scheme.number.is_int else torch.float8_e4m3fn
        if packs_zeros(scheme):
            infos["weight_zero_point"] = (rows if self.padded_zeros else words_for(rows, scheme.bits), columns), torch.int32
        elif scheme.symmetry is Symmetry.ASYM:
            infos["weight_zero_point"] = (1,) if per_tensor else (rows, columns), torch.int8
        if scheme.activations is not None and scheme.activations.static:
            infos["input_scale"] = (1,), torch.float32
        return infos

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the tensors describe.

        Raises:
            ModelError: a tensor is missing, or its shape or type does not fit the scheme.
        """
        if scheme.number is Number.FP4_E2M1:
            return _unpack_fp4(tensors, scheme)
        codes = _unpack_codes(tensors, scheme)
        rows, columns = scheme.scale_shape(*codes.shape)
        scales = _reshaped(take(tensors, "weight_scale", NAME), (rows, columns), "weight_scale")
        index = tensors.get("weight_g_idx")
        if index is not None:
            index = expect_group_index(expect_shape(index, (codes.shape[1],), "weight_g_idx", NAME), columns, NAME)
        return QuantizedLinear(
            scheme,
            codes,
            expect_finite(scales, "weight_scale", NAME),
            _unpack_zeros(tensors, scheme, rows, columns),
            index,
            input_scale=_input_scale(tensors, scheme),
            bias=tensors.get("bias"),
        )


def format_of(scheme: Scheme) -> str:
    """The name that compressed-tensors gives to how weights of this scheme are stored."""
    if scheme.number is Number.FP4_E2M1:
        return _FP4_FORMATS[scheme.granularity.columns, scheme.scale]
    if not scheme.number.is_int:
        return "float-quantized" if scheme.activations is not None else "naive-quantized"
    return "int-quantized" if scheme.activations is not None and scheme.bits == 8 else "pack-quantized"


def table_problem(scheme: Scheme) -> str | None:
    """None when an embedding may hold such codes (and share them with the output head that it is tied to), or the reason why not.

    transformers 5.23 loads embeddings whose codes are bytes (`int-quantized`); packed ones it takes for missing weights.
    """
    if scheme.number is Number.INT8 and scheme.symmetric and scheme.activations is None and scheme.granularity.per in (Per.CHANNEL, Per.GROUP):
        return None
    return f"transformers loads embeddings as symmetric int8 weights per channel or group, not {scheme}"


def scale_dtype_for(scheme: Scheme, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales of a scheme are stored in a model of `model_dtype`: exact for every value, and exact after loading.

    transformers multiplies in the stored dtype when it dequantizes while loading, which it does for asymmetric weights; those get fp32 scales.
    """
    if scheme.symmetry is Symmetry.ASYM or model_dtype not in (torch.float16, torch.bfloat16):
        return torch.float32
    if scheme.scale.type is ScaleType.F16BF16 or SCALE_DTYPES.get(scheme.scale.type) is model_dtype:
        return model_dtype
    return torch.float32


def packs_zeros(scheme: Scheme) -> bool:
    """Whether zero points are packed into int32 words, as codes are."""
    return scheme.symmetry is Symmetry.ASYM and format_of(scheme) == "pack-quantized" and scheme.granularity.per is not Per.TENSOR


def _pack_fp4(q: QuantizedLinear) -> dict[str, torch.Tensor]:
    tensors = {"weight_packed": pack_nibbles(q.codes)}
    if q.super_scales is None:
        tensors["weight_scale"] = (torch.frexp(q.scales).exponent + 126).to(torch.uint8)  # 2**e is 0.5 * 2**(e + 1), stored as e + 127
    else:
        codes = numerics.scale_codes(q.scales, q.super_scales, q.scheme)
        if not torch.equal(codes.float() / (1 / q.super_scales), q.scales):
            raise UnsupportedError("compressed-tensors keeps the reciprocal of NVFP4's scale of a tensor; with this one, no power of two, it would hold other weights")
        tensors |= {"weight_scale": codes, "weight_global_scale": 1 / q.super_scales}
    return tensors


def _unpack_fp4(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
    packed, stored = take(tensors, "weight_packed", NAME), take(tensors, "weight_scale", NAME)
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ModelError(f"weight_packed is {packed.dtype} {list(packed.shape)}; FP4 codes are a matrix of uint8")
    codes = unpack_nibbles(packed)
    expect_shape(stored, scheme.scale_shape(*codes.shape), "weight_scale", NAME)
    expected = torch.float8_e4m3fn if scheme.scale == NVFP4 else torch.uint8
    if stored.dtype != expected:
        raise ModelError(f"weight_scale is {stored.dtype}; its scheme {scheme} needs {expected}")
    upper = None
    if scheme.scale == NVFP4:
        reciprocal = expect_finite(expect_shape(take(tensors, "weight_global_scale", NAME), (1,), "weight_global_scale", NAME), "weight_global_scale", NAME)
        scales, upper = stored.float() / reciprocal, 1 / reciprocal
    else:
        scales = torch.ldexp(torch.ones(stored.shape), stored.int() - 127)
    scales = expect_finite(scales, "weight_scale", NAME)
    return QuantizedLinear(scheme, codes, scales, super_scales=upper, input_scale=_input_scale(tensors, scheme), bias=tensors.get("bias"))


def _input_scale(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor | None:
    if scheme.activations is None or not scheme.activations.static:
        return None
    return expect_finite(expect_shape(take(tensors, "input_scale", NAME), (1,), "input_scale", NAME), "input_scale", NAME).reshape(())


def _unsigned(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes as the layout packs them: symmetric ones shifted into 0 .. 2**bits - 1."""
    return codes.view(torch.uint8) + (1 << (scheme.bits - 1)) if scheme.symmetric else codes


def _signed(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes (or zero points) as the layout stores them in int8: unsigned ones shifted down."""
    return codes if codes.dtype == torch.int8 else signed(codes, scheme.bits)


def _reshaped(tensor: torch.Tensor, shape: tuple[int, int], name: str) -> torch.Tensor:
    """The tensor as a matrix; that of one element may have fewer dimensions, as older versions wrote scales of a whole tensor."""
    return tensor.reshape(shape) if tensor.numel() == 1 == math.prod(shape) else expect_shape(tensor, shape, name, NAME)


def _unpack_codes(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    if "weight_packed" in tensors:
        packed, shape = tensors["weight_packed"], expect_shape(take(tensors, "weight_shape", NAME), (2,), "weight_shape", NAME).tolist()
        if packed.dtype != torch.int32 or min(shape) < 1:
            raise ModelError(f"weight_packed is {packed.dtype} with weight_shape {shape}; a packed weight is int32 with two positive sizes")
        expect_shape(packed, (shape[0], words_for(shape[1], scheme.bits)), "weight_packed", NAME)
        codes = unpack_words(packed, scheme.bits, shape[1])
        return signed(codes, scheme.bits) if scheme.symmetric else codes
    weight = take(tensors, "weight", NAME)
    expected = torch.int8 if scheme.number.is_int else torch.float8_e4m3fn
    if weight.dtype != expected or weight.dim() != 2:
        raise ModelError(f"weight is {weight.dtype} {list(weight.shape)}; its scheme {scheme} needs a matrix of {expected}")
    if not scheme.number.is_int:
        codes = weight.contiguous().view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            raise ModelError("weight holds values that are not finite; the file is damaged or was made from such weights")
        return codes
    return weight if scheme.symmetric else weight.view(torch.uint8) + (1 << (scheme.bits - 1))


def _unpack_zeros(tensors: Mapping[str, torch.Tensor], scheme: Scheme, rows: int, columns: int) -> torch.Tensor | None:
    if scheme.symmetry is not Symmetry.ASYM:
        return None
    stored = take(tensors, "weight_zero_point", NAME)
    if stored.is_floating_point() or stored.is_complex():
        raise ModelError(f"weight_zero_point is {stored.dtype}, where integers are needed")
    if stored.dtype != torch.int32:
        zeros = _reshaped(stored, (rows, columns), "weight_zero_point").to(torch.int64) + (1 << (scheme.bits - 1))
        if ((zeros < 0) | (zeros >= 1 << scheme.bits)).any():
            raise ModelError(f"weight_zero_point holds values that {scheme} cannot")
        return zeros.to(torch.uint8)
    words = words_for(rows, scheme.bits)
    if tuple(stored.shape) != (rows, columns):  # padded to as many rows as there are outputs
        expect_shape(stored, (words, columns), "weight_zero_point", NAME)
    return unpack_words(stored[:words].contiguous(), scheme.bits, rows, dim=0)
