"""What pydantic found wrong in a recipe -> one readable line each: field, what was given, what is allowed, and other tools' names for our fields."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from qforge.recipe.model import Recipe

_ACT_ORDER, _DAMPING, _SCHEME = "quantize.options.act_order", "quantize.options.damping", "quantize.scheme (bits, group and symmetry are one text: int4-g64-sym)"
FOREIGN_KEYS = {
    **dict.fromkeys(("desc_act", "actorder", "act_group_aware", "activation_ordering"), _ACT_ORDER),
    **dict.fromkeys(("bits", "w_bit", "wbits", "num_bits", "nbits", "weight_bits", "load_in_4bit", "load_in_8bit"), _SCHEME),
    **dict.fromkeys(("group_size", "q_group_size", "groupsize", "block_size"), _SCHEME),
    **dict.fromkeys(("sym", "symmetric", "zero_point", "strategy", "weight_dtype", "quant_type"), _SCHEME),
    **dict.fromkeys(("damp_percent", "dampening_frac", "percdamp", "damp", "damp_auto_increment"), _DAMPING),
    **dict.fromkeys(("dataset", "calibration_dataset", "calib_data", "calibration_data", "data"), "calibration.source"),
    **dict.fromkeys(("nsamples", "num_samples", "num_calibration_samples", "n_samples", "max_calib_samples", "calib_size"), "calibration.samples"),
    **dict.fromkeys(("seqlen", "seq_len", "max_seq_length", "max_seq_len", "model_seqlen", "max_calib_seq_len"), "calibration.sequence_length"),
    **dict.fromkeys(("modules_to_not_convert", "skip_modules", "exclude", "exclude_modules", "llm_int8_skip_modules", "not_convert"), "quantize.ignore"),
    **dict.fromkeys(("dynamic", "layer_config", "config_groups", "extra_config", "targets"), "quantize.overrides"),
    **dict.fromkeys(("quant_method", "algorithm", "algo", "modifier", "recipe"), "quantize.method"),
    **dict.fromkeys(("mse", "mse_range", "observer"), "quantize.options.scale_search"),
    **dict.fromkeys(("lora", "loras", "adapter", "peft", "adapter_name_or_path"), "adapters (a list: [{source: ./my-lora}])"),
    **dict.fromkeys(("model_id", "model_name_or_path", "model_name", "base_model", "pretrained"), "model.source"),
    **dict.fromkeys(("torch_dtype", "precision"), "model.dtype"),
    **dict.fromkeys(("checkpoint_format", "export_to", "exports", "formats_to_export"), "export (a list: [{format: gguf, type: q4_0}])"),
    **dict.fromkeys(("outtype", "ftype", "gguf_type", "qtype"), "export: [{format: gguf, type: ...}]"),
    **dict.fromkeys(("iters", "iterations"), "quantize.options.steps (of method signround)"),
}
_PLAIN = {
    "missing": "is required",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list, [..., ...]",
    "dict_type": "a mapping, {key: value}",
    "model_type": "a mapping, {key: value}",
    "model_attributes_type": "a mapping, {key: value}",
}


def field_of(location: Sequence[str | int]) -> str:
    """The path of a field as a user writes it: `quantize.overrides[0].scheme`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def describe(error: ErrorDetails) -> str:
    """One line without file and line number: what was given, what is allowed."""
    location = [p for p in error["loc"] if p != "[key]"]
    field, kind = field_of(location), error["type"]
    if kind == "extra_forbidden" or error["loc"][-1:] == ("[key]",):
        return _unknown_key(location)
    if kind == "missing":
        return f"{field} is required" + _example(location)
    given = _shown(error["input"])
    if kind == "value_error":
        message = str(error.get("ctx", {}).get("error", error["msg"]))
        return f"{field}: {message}" if isinstance(error["input"], dict) else f"{field}: given {given}; {message}"
    allowed = _PLAIN.get(kind) or error["msg"].removeprefix("Input should be ")
    if kind == "string_type" and isinstance(error["input"], int | float):
        allowed += f' (put it in quotes if you mean it: "{json.dumps(error["input"])}")'
    if kind == "literal_error" and isinstance(error["input"], str):
        allowed += _closest(error["input"], str(error.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", "))
    return f"{field or 'the recipe'}: given {given}; allowed: {allowed}"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return "nothing" if value is None else text if len(text) <= 80 else text[:77] + "..."


def _example(location: Sequence[str | int]) -> str:
    return {"version": ": version: 1", "model": ": model: {source: demo}", "quantize": ": quantize: {method: gptq, scheme: int4-g64-sym}"}.get(field_of(location), "")


def _closest(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, words, 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _unknown_key(location: Sequence[str | int]) -> str:
    key, parent = str(location[-1]), field_of(location[:-1]) or "a recipe"
    allowed = _keys_at(location[:-1])
    if key in FOREIGN_KEYS:
        return f"{field_of(location)} is another tool's name; in qforge it is {FOREIGN_KEYS[key]}"
    near = _closest(key, allowed)
    homes = [] if near else _homes(key, Recipe, "")
    hint = near or (f" ({key} belongs at {homes[0]})" if homes else "")
    return f"unknown key '{key}' in {parent}{hint}; allowed: {', '.join(allowed)}"


def _sections(annotation: Any) -> list[Any]:
    """The recipe sections that a field's type can hold (through lists, mappings and null), and the words allowed as keys of a mapping."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [s for a in typing.get_args(annotation) for s in _sections(a)]
    return []


def _keys_at(location: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in location:
        if not isinstance(part, str) or part not in section.model_fields:
            continue
        annotation = section.model_fields[part].annotation
        if typing.get_origin(annotation) is dict and part == location[-1]:
            return list(typing.get_args(typing.get_args(annotation)[0]))
        found = _sections(annotation)
        section = found[0] if found else section
    return list(section.model_fields)


def _homes(key: str, section: type[BaseModel], path: str) -> list[str]:
    """Where in a recipe a field of this name stands."""
    found = []
    for name, field in section.model_fields.items():
        at = f"{path}.{name}".removeprefix(".")
        found += [at] if name == key else []
        for inner in _sections(field.annotation):
            found += _homes(key, inner, at)
    return found
