"""The `quantization_config` of a compressed-tensors checkpoint: which linear has which scheme.

It has groups, each with targets (module names, `re:` patterns, or the class `Linear`) and what their weights and inputs are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qforge import patterns
from qforge.errors import ModelError
from qforge.layouts.compressed_tensors import MXFP4, NAME, NVFP4, SCALE_DTYPES, format_of, packs_zeros
from qforge.scheme import ActivationScheme, Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry

_STRATEGIES = {Per.TENSOR: "tensor", Per.CHANNEL: "channel", Per.GROUP: "group", Per.BLOCK: "block", Per.TOKEN: "token"}
_FP4_ARGUMENTS = {
    NVFP4: {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
    MXFP4: {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
}
_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERTS_TARGET = r"re:.*\.experts\.\d+\..*"
_INTEGERS = {n.bits: n for n in Number if n.is_int}


def quantization_config(schemes: Mapping[str, Scheme], ignored: Sequence[str], tied: tuple[str, str] | None = None, *, plain: bool = True) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        schemes: the scheme of each quantized linear, by module name; empty where only keys and values are to be rounded.
        ignored: module names of the linears that are not quantized, the output head included.
        tied: the output head among them and the embedding with which it shares its codes (`table_problem` of its scheme is None); None where it has codes of its own, or none.
        plain: whether the quantized linears are of torch's own class in transformers' code; those of another are dequantized on loading, where that is possible (`class_problem`).
    """
    if tied is not None:
        table = _group(schemes[tied[0]], list(tied), padded_zeros=False) | {"format": "int-quantized"}
        others = {name: scheme for name, scheme in schemes.items() if name != tied[0]}
        if not others:
            return _config({"group_0": table}, "int-quantized", ignored)
        config = quantization_config(others, ignored)
        groups = {f"group_{i}": group for i, group in enumerate([table, *config["config_groups"].values()])}
        return _config(groups, "mixed-precision", ignored)
    counts = Counter(schemes.values())
    ordered = sorted(counts, key=lambda s: (counts[s], str(s)))  # the class target last, or compressed-tensors warns about the exact ones
    dequantized = dequantized_on_loading(ordered)
    of_experts = {scheme for name, scheme in schemes.items() if _EXPERT.search(name)}
    groups = {}
    for i, scheme in enumerate(ordered):
        targets = ["Linear"] if scheme is ordered[-1] else sorted(name for name, s in schemes.items() if s == scheme and not (of_experts == {scheme} and _EXPERT.search(name)))
        if len(ordered) > 1 and of_experts == {scheme}:
            targets.append(_EXPERTS_TARGET)  # by which transformers 5.23 knows the group that its fused experts are in
        groups[f"group_{i}"] = _group(scheme, targets, padded_zeros=not dequantized)
    formats = {format_of(s) for s in ordered}
    config = _config(groups, formats.pop() if len(formats) == 1 else "mixed-precision" if formats else "dense", ignored)
    return config | ({"dequantize": True} if dequantized or (not plain and _dequantizable(ordered)) else {})


def _config(groups: Mapping[str, Any], kind: str, ignored: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": NAME,
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def dequantized_on_loading(schemes: Iterable[Scheme]) -> bool:
    """Whether config.json asks transformers 5.23 to dequantize while it loads, as it must for packed zero points and for FP4 (which it else takes to bfloat16, whatever the model's
    dtype is). It can where all linears have one scheme, and where none of them rounds its inputs, which a dequantized linear no longer does."""
    distinct = set(schemes)
    return _dequantizable(distinct) and all(packs_zeros(s) or s.number is Number.FP4_E2M1 for s in distinct)


def _dequantizable(schemes: Iterable[Scheme]) -> bool:
    distinct = set(schemes)
    return len(distinct) == 1 and all(s.activations is None for s in distinct)


def class_problem(schemes: Iterable[Scheme], *, tied: bool) -> str | None:
    """None, or why transformers 5.23 does not load a checkpoint with quantized linears of another class than torch's (FalconLinear): its code for the family initialises their
    `weight`, which is not there where codes are packed, unless it dequantizes while it loads; and bitsandbytes takes the place of torch's class alone.

    Args:
        schemes: of all quantized linears.
        tied: whether the output head and the embedding share codes.
    """
    distinct = set(schemes)
    if any(s.number is Number.NF4 for s in distinct):
        return "puts no nf4 into linears of another class than torch's"
    if (_dequantizable(distinct) and not tied) or not any(format_of(s).endswith("pack-quantized") for s in distinct):
        return None
    return "initialises their weights, which packed codes do not have, unless all layers have one scheme that quantizes weights alone, and the output head none that is tied"


def experts_problem(schemes: Iterable[Scheme | None]) -> str | None:
    """None, or why transformers 5.23, which dequantizes experts into its fused stacks as it loads them, does not load experts of these schemes (None: unquantized) or takes them
    for something else. Other programs (and we) read what the artifact says."""
    distinct = set(schemes)
    if len(distinct) > 1:
        return "takes the experts of a model to have one scheme"
    for scheme in distinct:
        if scheme is None:
            return "does not load unquantized experts of a quantized checkpoint"
        whole = scheme.number is Number.FP8_E4M3 and scheme.granularity.per in (Per.TENSOR, Per.CHANNEL)
        if not (whole or (scheme.number.is_int and scheme.symmetric)):
            return f"does not read {scheme} experts: only symmetric integers, and FP8 per tensor or channel"
        if scheme.activations is not None:
            return "does not round the inputs of experts" if whole else f"does not read {scheme} experts: integers without rounded activations only"
    return None


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
    return patterns.matches(target.removeprefix("re:"), name, "quantization_config")


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
    if scheme.scale.type in SCALE_DTYPES:
        weights["scale_dtype"] = str(SCALE_DTYPES[scheme.scale.type])
    if scheme.number is Number.FP4_E2M1:
        weights |= _FP4_ARGUMENTS[scheme.scale]
    if padded_zeros and packs_zeros(scheme):
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
    number = _number(weights)
    scale = ScaleFormat({str(d): t for t, d in SCALE_DTYPES.items()}.get(str(weights.get("scale_dtype")), ScaleType.F16BF16))
    if number is Number.FP4_E2M1:
        scale = NVFP4 if weights.get("strategy") == "tensor_group" else MXFP4
    activations = None
    if inputs is not None:
        if not inputs.get("symmetric", True):
            raise ModelError("this checkpoint rounds activations with a zero point; qforge reads symmetric activations only")
        activations = ActivationScheme(_number(inputs), _granularity(inputs), static=not inputs.get("dynamic", False))
        if activations.number not in (Number.INT8, Number.FP8_E4M3):
            raise ModelError(f"this checkpoint rounds activations to {activations.number}; qforge runs int8 and fp8-e4m3 activations")
    return Scheme(number, _granularity(weights), Symmetry.SYM if symmetric else Symmetry.ASYM, scale, activations)


def _number(args: Mapping[str, Any]) -> Number:
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if kind == "float" and bits in (4, 8):
        return Number.FP8_E4M3 if bits == 8 else Number.FP4_E2M1
    if kind == "int" and isinstance(bits, int) and bits in _INTEGERS:
        return _INTEGERS[bits]
    raise ModelError(
        f"this checkpoint has {kind!r} numbers of {bits!r} bits; qforge reads int{'/int'.join(map(str, sorted(_INTEGERS)))} and floats of 4 and 8 bits from compressed-tensors"
    )


def _granularity(args: Mapping[str, Any]) -> Granularity:
    size, structure = args.get("group_size"), args.get("block_structure")
    strategy = args.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy in ("group", "tensor_group") and isinstance(size, int) and size > 0:
        return Granularity(Per.GROUP, size, 1)
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2 and all(isinstance(n, int) and n > 0 for n in structure):
        return Granularity(Per.BLOCK, structure[1], structure[0])
    if strategy in ("tensor", "channel", "token"):
        return Granularity(Per(strategy))
    raise ModelError(f"this checkpoint has the strategy {strategy!r} (group_size {size!r}, block_structure {structure!r}), which qforge does not read")
