"""The compressed-tensors layout: tensors of one linear, and the `quantization_config` that says which linear has which scheme.

Formats (compressed-tensors 0.20, and llm-compressor's checkpoints before it): `pack-quantized` (integers of 2 to 8 bits in int32 words),
`int-quantized` (8-bit integers, with activations that are rounded too), `float-quantized` and `naive-quantized` (FP8).

Letters: O output features, I input features, R x C shape of the scales.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.layouts.base import expect_finite, expect_group_index, expect_shape, take
from qforge.layouts.bits import pack_words, unpack_words, words_for
from qforge.qlinear import QuantizedLinear
from qforge.scheme import ActivationScheme, Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

NAME = "compressed-tensors"
_SCALE_DTYPES = {ScaleType.F16: torch.float16, ScaleType.BF16: torch.bfloat16, ScaleType.F32: torch.float32}
_STRATEGIES = {Per.TENSOR: "tensor", Per.CHANNEL: "channel", Per.GROUP: "group", Per.BLOCK: "block", Per.TOKEN: "token"}
_INTEGERS = {n.bits: n for n in Number if n.is_int}


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The layout (see `qforge.layouts.base.Layout`).

    Attributes:
        scale_dtype: the dtype in which scales are stored; every scale must be exact in it (`scale_dtype_for` chooses one).
        padded_zeros: store packed zero points with O rows, the unused ones zero, instead of O * bits / 32. compressed-tensors 0.20 makes a
            parameter of O rows when it loads without `dequantize`, and `dequantize` reads every linear with the scheme of the first group:
            a checkpoint with an asymmetric group *and* another one loads in transformers only in this form.
    """

    scale_dtype: torch.dtype = torch.float32
    padded_zeros: bool = False
    name: str = NAME

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""
        if scheme.symmetry is Symmetry.OFFSET:
            return "compressed-tensors has integer zero points, no offsets"
        if scheme.scale.super_granularity is not None or (scheme.scale.type is not ScaleType.F16BF16 and scheme.scale.type not in _SCALE_DTYPES):
            return f"compressed-tensors holds scales in f16, bf16 or f32 here, not {scheme.scale}"
        if not scheme.number.is_int and scheme.number is not Number.FP8_E4M3:
            return f"compressed-tensors has no {scheme.number} weights here; it has int2 to int8 and fp8-e4m3"
        if scheme.number.is_int and scheme.granularity.per is Per.BLOCK:
            return "compressed-tensors has blocks for fp8 only; integers are per tensor, channel or group"
        return None

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """Codes, scales and zero points by the layout's local names; symmetric codes are stored with an offset where they are packed."""
        assert self.supports(q.scheme) is None, self.supports(q.scheme)
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
        if q.group_index is not None:
            tensors["weight_g_idx"] = q.group_index.to(torch.int32)
        if q.input_scale is not None:
            tensors["input_scale"] = q.input_scale.float().reshape(1)
        return tensors

    def _pack_zeros(self, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
        if not _packs_zeros(scheme):
            signed = _signed(zeros, scheme)
            return signed.reshape(1) if scheme.granularity.per is Per.TENSOR else signed
        packed = pack_words(zeros, scheme.bits, dim=0)
        return torch.nn.functional.pad(packed, (0, 0, 0, zeros.shape[0] - packed.shape[0])) if self.padded_zeros else packed

    def infos(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what `pack` gives for a weight `[O, I]` with contiguous groups, known before the weight is."""
        rows, columns = scheme.scale_shape(out_features, in_features)
        per_tensor = scheme.granularity.per is Per.TENSOR
        infos: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"weight_scale": ((1,) if per_tensor else (rows, columns), self.scale_dtype)}
        if format_of(scheme) == "pack-quantized":
            infos["weight_packed"] = (out_features, words_for(in_features, scheme.bits)), torch.int32
            infos["weight_shape"] = (2,), torch.int64
        else:
            infos["weight"] = (out_features, in_features), torch.int8 if scheme.number.is_int else torch.float8_e4m3fn
        if _packs_zeros(scheme):
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
        codes = _unpack_codes(tensors, scheme)
        rows, columns = scheme.scale_shape(*codes.shape)
        scales = _reshaped(take(tensors, "weight_scale", NAME), (rows, columns), "weight_scale")
        index = tensors.get("weight_g_idx")
        if index is not None:
            index = expect_group_index(expect_shape(index, (codes.shape[1],), "weight_g_idx", NAME), columns, NAME)
        input_scale = tensors.get("input_scale")
        return QuantizedLinear(
            scheme,
            codes,
            expect_finite(scales, "weight_scale", NAME),
            _unpack_zeros(tensors, scheme, rows, columns),
            index,
            input_scale=None if input_scale is None else expect_finite(input_scale, "input_scale", NAME).reshape(()),
            bias=tensors.get("bias"),
        )


def format_of(scheme: Scheme) -> str:
    """The name that compressed-tensors gives to how weights of this scheme are stored."""
    if not scheme.number.is_int:
        return "float-quantized" if scheme.activations is not None else "naive-quantized"
    return "int-quantized" if scheme.activations is not None and scheme.bits == 8 else "pack-quantized"


def scale_dtype_for(scheme: Scheme, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales of a scheme are stored in a model of `model_dtype`: exact for every value, and exact after loading.

    transformers multiplies in the stored dtype when it dequantizes while loading, which it does for asymmetric weights; those get fp32 scales.
    """
    if scheme.symmetry is Symmetry.ASYM or model_dtype not in (torch.float16, torch.bfloat16):
        return torch.float32
    if scheme.scale.type is ScaleType.F16BF16 or _SCALE_DTYPES.get(scheme.scale.type) is model_dtype:
        return model_dtype
    return torch.float32


def layout_for(scheme: Scheme, schemes: Mapping[str, Scheme], model_dtype: torch.dtype) -> CompressedTensors:
    """The layout of a linear with `scheme` in a checkpoint that holds `schemes`."""
    return CompressedTensors(scale_dtype_for(scheme, model_dtype), padded_zeros=len(set(schemes.values())) > 1)


def quantization_config(schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        schemes: the scheme of each quantized linear, by module name; not empty.
        ignored: module names of the linears that are not quantized, the output head included.
    """
    counts = Counter(schemes.values())
    ordered = sorted(counts, key=lambda s: (counts[s], str(s)))  # the class target last, or compressed-tensors warns about the exact ones
    mixed = len(ordered) > 1
    groups = {}
    for i, scheme in enumerate(ordered):
        targets = ["Linear"] if scheme is ordered[-1] else sorted(name for name, s in schemes.items() if s == scheme)
        groups[f"group_{i}"] = _group(scheme, targets, padded_zeros=mixed)
    formats = {format_of(s) for s in ordered}
    config: dict[str, Any] = {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    if not mixed and _packs_zeros(ordered[0]):
        config["dequantize"] = True  # transformers 5.23 cannot load packed zero points otherwise
    return config


def read_config(config: Mapping[str, Any], linear_names: Sequence[str]) -> dict[str, Scheme]:
    """The scheme of each quantized linear, from a `quantization_config` that we or others wrote.

    Args:
        config: `quantization_config` of config.json.
        linear_names: module names of all linears of the model, the output head included.

    Raises:
        ModelError: the config is malformed, or describes weights that qforge does not know.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("quantization_config has no config_groups; this is not a compressed-tensors checkpoint that qforge can read")
    targets: dict[str, Scheme] = {}
    for name, group in groups.items():
        expanded = _preset(name, group) if isinstance(group, list) else group
        if not isinstance(expanded, Mapping) or not isinstance(expanded.get("targets"), list):
            raise ModelError(f"config group '{name}' of quantization_config has no targets")
        if expanded.get("weights") is not None:
            targets.update(dict.fromkeys(map(str, expanded["targets"]), _scheme(expanded)))
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list):
        raise ModelError("ignore of quantization_config is not a list of names")
    found = {name: _best_match(name, targets) for name in linear_names if not any(_matches(name, str(i)) for i in ignored)}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


def _matches(name: str, target: str) -> bool:
    if not target.startswith("re:"):
        return target in (name, "Linear")
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as e:
        raise ModelError(f"quantization_config holds the pattern '{target}', which is not a regular expression: {e}") from e


def _best_match(name: str, targets: Mapping[str, Scheme]) -> Scheme | None:
    """compressed-tensors' precedence: the exact name, then regular expressions in sorted order, then the class."""
    if name in targets:
        return targets[name]
    return next((targets[t] for t in sorted(t for t in targets if t.startswith("re:")) if _matches(name, t)), targets.get("Linear"))


def _preset(name: str, targets: list[str]) -> dict[str, Any]:
    from compressed_tensors.quantization.quant_scheme import is_preset_scheme, preset_name_to_scheme

    if not is_preset_scheme(name):
        raise ModelError(f"config group '{name}' of quantization_config is neither described nor a preset of compressed-tensors")
    return dict(preset_name_to_scheme(name, targets).model_dump(mode="json"))


def _group(scheme: Scheme, targets: list[str], *, padded_zeros: bool) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": "int" if scheme.number.is_int else "float", "symmetric": scheme.symmetric, "dynamic": False}
    weights |= _strategy(scheme.granularity)
    if scheme.scale.type in _SCALE_DTYPES:
        weights["scale_dtype"] = str(_SCALE_DTYPES[scheme.scale.type])
    if padded_zeros and _packs_zeros(scheme):
        weights["zp_dtype"] = "torch.int32"
    activations = None
    if scheme.activations is not None:
        a = scheme.activations
        activations = {"num_bits": a.number.bits, "type": "int" if a.number.is_int else "float", "symmetric": True, "dynamic": not a.static} | _strategy(a.granularity)
    return {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None, "format": format_of(scheme)}


def _strategy(granularity: Granularity) -> dict[str, Any]:
    found: dict[str, Any] = {"strategy": _STRATEGIES[granularity.per], "group_size": granularity.columns if granularity.per is Per.GROUP else None}
    if granularity.per is Per.BLOCK:
        found["block_structure"] = [granularity.rows, granularity.columns]
    return found


def _scheme(group: Mapping[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group.get("input_activations")
    for key, args in (("weights", weights), ("input_activations", {} if inputs is None else inputs)):
        if not isinstance(args, Mapping):
            raise ModelError(f"{key} of a config group in quantization_config is not an object")
    symmetric = bool(weights.get("symmetric", True))
    scale = {str(d): t for t, d in _SCALE_DTYPES.items()}.get(str(weights.get("scale_dtype")), ScaleType.F16BF16)
    activations = None
    if inputs is not None:
        if not inputs.get("symmetric", True):
            raise ModelError("this checkpoint rounds activations with a zero point; qforge reads symmetric activations only")
        activations = ActivationScheme(_number(inputs), _granularity(inputs), static=not inputs.get("dynamic", False))
    return Scheme(_number(weights), _granularity(weights), Symmetry.SYM if symmetric else Symmetry.ASYM, ScaleFormat(scale), activations)


def _number(args: Mapping[str, Any]) -> Number:
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if kind == "float" and bits == 8:
        return Number.FP8_E4M3
    if kind == "int" and isinstance(bits, int) and bits in _INTEGERS:
        return _INTEGERS[bits]
    raise ModelError(f"this checkpoint has {kind} numbers of {bits} bits; qforge reads int{'/int'.join(map(str, sorted(_INTEGERS)))} and 8-bit floats from compressed-tensors")


def _granularity(args: Mapping[str, Any]) -> Granularity:
    size, structure = args.get("group_size"), args.get("block_structure")
    strategy = args.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy == "group" and isinstance(size, int) and size > 0:
        return Granularity(Per.GROUP, size, 1)
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2 and all(isinstance(n, int) and n > 0 for n in structure):
        return Granularity(Per.BLOCK, structure[1], structure[0])
    if strategy in ("tensor", "channel", "token"):
        return Granularity(Per(strategy))
    raise ModelError(f"this checkpoint has the strategy '{strategy}' (group_size {size}, block_structure {structure}), which qforge does not read")


def _packs_zeros(scheme: Scheme) -> bool:
    return scheme.symmetry is Symmetry.ASYM and format_of(scheme) == "pack-quantized" and scheme.granularity.per is not Per.TENSOR


def _unsigned(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes as the layout packs them: symmetric ones shifted into 0 .. 2**bits - 1."""
    return (codes.to(torch.int16) + (1 << (scheme.bits - 1))).to(torch.uint8) if scheme.symmetric else codes


def _signed(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes (or zero points) as the layout stores them in int8: unsigned ones shifted down."""
    return codes if codes.dtype == torch.int8 else (codes.to(torch.int16) - (1 << (scheme.bits - 1))).to(torch.int8)


def _reshaped(tensor: torch.Tensor, shape: tuple[int, int], name: str) -> torch.Tensor:
    if tensor.numel() != shape[0] * shape[1]:
        expect_shape(tensor, shape, name, NAME)
    return tensor.reshape(shape)


def _unpack_codes(tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    if "weight_packed" in tensors:
        packed, shape = tensors["weight_packed"], take(tensors, "weight_shape", NAME).flatten().tolist()
        if packed.dtype != torch.int32 or len(shape) != 2 or min(shape) < 1:
            raise ModelError(f"weight_packed is {packed.dtype} with weight_shape {shape}; a packed weight is int32 with two positive sizes")
        expect_shape(packed, (shape[0], words_for(shape[1], scheme.bits)), "weight_packed", NAME)
        codes = unpack_words(packed, scheme.bits, shape[1])
        return (codes.to(torch.int16) - (1 << (scheme.bits - 1))).to(torch.int8) if scheme.symmetric else codes
    weight = take(tensors, "weight", NAME)
    expected = torch.int8 if scheme.number.is_int else torch.float8_e4m3fn
    if weight.dtype != expected or weight.dim() != 2:
        raise ModelError(f"weight is {weight.dtype} {list(weight.shape)}; its scheme {scheme} needs a matrix of {expected}")
    if not scheme.number.is_int:
        return weight.contiguous().view(torch.uint8)
    return weight if scheme.symmetric else (weight.to(torch.int16) + (1 << (scheme.bits - 1))).to(torch.uint8)


def _unpack_zeros(tensors: Mapping[str, torch.Tensor], scheme: Scheme, rows: int, columns: int) -> torch.Tensor | None:
    if scheme.symmetry is not Symmetry.ASYM:
        return None
    stored = take(tensors, "weight_zero_point", NAME)
    if stored.dtype != torch.int32:
        return (_reshaped(stored, (rows, columns), "weight_zero_point").to(torch.int16) + (1 << (scheme.bits - 1))).to(torch.uint8)
    words = words_for(rows, scheme.bits)
    if stored.shape[0] != rows:
        expect_shape(stored, (words, columns), "weight_zero_point", NAME)
    return unpack_words(stored[:words].contiguous(), scheme.bits, rows, dim=0)
