"""The layout of bitsandbytes' 4-bit checkpoints: NF4 codes in blocks of one row, with or without double quantization of the scales.

    weight                              uint8 [O * I / 2, 1]   codes, rows following each other, the first of two in the *high* half
    weight.absmax                       uint8 [B]              codes of the blocks' scales, or fp32 scales
    weight.nested_absmax                fp32  [B / 256]        second-level scales                      (double quantization only)
    weight.nested_quant_map             fp32  [256]            what a scale's code stands for           (double quantization only)
    weight.quant_map                    fp32  [16]             what a code stands for
    weight.quant_state.bitsandbytes__nf4  uint8                JSON: sizes, types, and the mean that was subtracted from the scales

Letters: O output features, I input features, B blocks of the whole weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qforge import numerics
from qforge.errors import ModelError
from qforge.layouts.base import expect_finite, expect_shape, take
from qforge.layouts.bits import pack_nibbles, unpack_nibbles
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme

NAME = "bitsandbytes"
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights that share a scale, as bitsandbytes' kernels have them
_NESTED = 256  # scales that share a second-level scale
STATE = "weight.quant_state.bitsandbytes__nf4"
_STATE_BYTES = 240  # the JSON text is filled up with spaces, so that its length is known before the weight is


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The layout (see `qforge.layouts.base.Layout`); `dtype` is the one that bitsandbytes dequantizes to."""

    dtype: torch.dtype = torch.float32
    name: str = NAME

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if scheme.number is not Number.NF4:
            return f"a 4-bit bitsandbytes checkpoint holds nf4, not {scheme.number}"
        if scheme.granularity.per is not Per.GROUP or scheme.granularity.columns not in BLOCKS:
            return f"bitsandbytes has blocks of {', '.join(map(str, BLOCKS))} weights, not {scheme.granularity}"
        if scheme.scale not in (_scales(double=True), _scales(double=False)):
            return f"bitsandbytes holds scales as {_scales(double=True)} or {_scales(double=False)}, not {scheme.scale}"
        if scheme.activations is not None:
            return "a bitsandbytes checkpoint cannot say that activations are rounded"
        return None

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors by local name."""
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": q.scheme.granularity.columns, "dtype": str(self.dtype).removeprefix("torch."), "shape": list(q.codes.shape),
        }  # fmt: skip
        tensors = {"weight": pack_nibbles(q.codes.reshape(-1, 2).flip(1)), "weight.quant_map": numerics.code_book(Number.NF4)}
        if q.super_scales is None:
            tensors["weight.absmax"] = q.scales.flatten()
        else:
            tensors["weight.absmax"] = numerics.scale_codes(q.scales, q.super_scales, q.scheme).flatten()
            tensors["weight.nested_absmax"] = q.super_scales[:-1].clone()
            tensors["weight.nested_quant_map"] = numerics.dynamic_code().clone()
            state |= {"nested_blocksize": _NESTED, "nested_dtype": "float32", "nested_offset": float(q.super_scales[-1])}
        tensors[STATE] = torch.tensor(list(json.dumps(state).ljust(_STATE_BYTES).encode()), dtype=torch.uint8)
        return tensors

    def infos(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `pack` gives for a weight `[O, I]`, known before the weight is."""
        blocks = out_features * in_features // scheme.granularity.columns
        double = scheme.scale.super_granularity is not None
        infos: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((out_features * in_features // 2, 1), torch.uint8),
            "weight.absmax": ((blocks,), torch.uint8 if double else torch.float32),
            "weight.quant_map": ((16,), torch.float32),
            STATE: ((_STATE_BYTES,), torch.uint8),
        }
        if double:
            infos |= {"weight.nested_absmax": ((-(-blocks // _NESTED),), torch.float32), "weight.nested_quant_map": ((256,), torch.float32)}
        return infos

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the tensors describe.

        Raises:
            ModelError: a tensor is missing, or its shape or values do not fit the scheme.
        """
        state = _state(take(tensors, STATE, NAME))
        shape = _shape(state)
        rows, columns = scheme.scale_shape(*shape)
        packed = expect_shape(take(tensors, "weight", NAME), (shape[0] * shape[1] // 2, 1), "weight", NAME)
        if packed.dtype != torch.uint8 or scheme != _scheme(state):
            raise ModelError(f"a {NAME} weight of type {packed.dtype} whose state says {_scheme(state)} does not fit the scheme {scheme}")
        _expect_map(tensors, "weight.quant_map", numerics.code_book(Number.NF4))
        codes = unpack_nibbles(packed).flip(1).reshape(shape)
        absmax = expect_shape(take(tensors, "weight.absmax", NAME), (rows * columns,), "weight.absmax", NAME).view(rows, columns)
        upper = None
        if scheme.scale.super_granularity is not None:
            _expect_map(tensors, "weight.nested_quant_map", numerics.dynamic_code())
            nested = expect_shape(take(tensors, "weight.nested_absmax", NAME), (-(-rows * columns // _NESTED),), "weight.nested_absmax", NAME)
            upper = torch.cat((nested.float(), torch.tensor([float(state["nested_offset"])])))
            absmax = numerics.scales_from_codes(absmax, upper, scheme)
        return QuantizedLinear(scheme, codes, expect_finite(absmax, "weight.absmax", NAME), super_scales=upper, bias=tensors.get("bias"))


def quantization_config(schemes: Mapping[str, Scheme], ignored: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        schemes: the scheme of each quantized linear, by module name; all equal, and not empty.
        ignored: module names of the linears that are not quantized, the output head included.
        dtype: in which bitsandbytes multiplies.
    """
    scheme = next(iter(schemes.values()))
    return {
        "quant_method": NAME,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": scheme.scale.super_granularity is not None,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": sorted(ignored),
    }


def read_config(config: Mapping[str, Any], quantized: Sequence[str], read: Callable[[str], torch.Tensor]) -> dict[str, Scheme]:
    """The scheme of each quantized linear; block sizes stand in the tensors only.

    Args:
        config: `quantization_config` of config.json.
        quantized: module names of the linears that have a quantization state.
        read: gives a stored tensor by name.

    Raises:
        ModelError: another kind of bitsandbytes checkpoint, or a damaged state.
    """
    if not config.get("load_in_4bit") or config.get("bnb_4bit_quant_type") != "nf4":
        raise ModelError("of bitsandbytes checkpoints qforge reads 4-bit nf4 ones; start from the unquantized model")
    return {name: _scheme(_state(read(f"{name}.{STATE}"))) for name in quantized}


def _scales(*, double: bool) -> ScaleFormat:
    return ScaleFormat(ScaleType.U8, Granularity(Per.GROUP, _NESTED, 1), ScaleType.F32) if double else ScaleFormat(ScaleType.F32)


def _state(stored: torch.Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
    except (ValueError, TypeError, RecursionError) as e:
        raise ModelError(f"{STATE} is not the JSON text that bitsandbytes writes: {e}") from e
    if not isinstance(state, dict) or state.get("quant_type") != "nf4" or type(state.get("blocksize")) is not int or state["blocksize"] not in BLOCKS:
        raise ModelError(f"{STATE} tells of {str(state)[:200]}; qforge reads nf4 in blocks of {', '.join(map(str, BLOCKS))}")
    if "nested_blocksize" in state and (state["nested_blocksize"] != _NESTED or not isinstance(state.get("nested_offset"), float)):
        raise ModelError(f"{STATE} tells of second-level scales for {state['nested_blocksize']} scales; qforge reads {_NESTED}, with an offset")
    return state


def _shape(state: Mapping[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape) or shape[1] % state["blocksize"]:
        raise ModelError(f"{STATE} tells of a weight of shape {shape}; a matrix whose rows hold whole blocks of {state['blocksize']} is readable")
    return shape[0], shape[1]


def _scheme(state: Mapping[str, Any]) -> Scheme:
    return Scheme(Number.NF4, Granularity(Per.GROUP, state["blocksize"], 1), scale=_scales(double="nested_blocksize" in state))


def _expect_map(tensors: Mapping[str, torch.Tensor], name: str, expected: torch.Tensor) -> None:
    if not torch.equal(take(tensors, name, NAME), expected):
        raise ModelError(f"{NAME} tensor '{name}' is not the usual one; these codes stand for other numbers than qforge knows")
