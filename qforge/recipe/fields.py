"""The types of a recipe's fields: what each accepts as text, what it becomes, and how the JSON Schema shows it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, Strict, WithJsonSchema

from qforge.errors import RecipeError
from qforge.recipe.limits import parse_budget, parse_limit, parse_size
from qforge.scheme import PRESETS, Scheme, parse

METHODS = ("none", "rtn", "gptq", "awq", "smoothquant", "rotate", "fp8", "nf4", "signround", "auto")
TRANSFORMS = ("awq", "smoothquant", "rotate")


def _scheme(value: Any) -> Scheme:
    if isinstance(value, Scheme):
        return value
    if not isinstance(value, str):
        raise ValueError(f"a scheme is a text such as int4-g64-sym, int8-channel-sym, or a preset ({', '.join(PRESETS)})")
    try:
        return parse(value)
    except RecipeError as e:
        raise ValueError(str(e)) from e


def _methods(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError(f"a method is one of {', '.join(METHODS)}, or a list such as [awq, gptq]")
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method '{name}'; known methods: {', '.join(METHODS)}")
    for name in names[:-1]:
        if name not in TRANSFORMS:
            raise ValueError(f"'{name}' cannot come before another method; these can: {', '.join(TRANSFORMS)} (for example [awq, gptq])")
    if "rotate" in names[1:]:
        raise ValueError("rotate turns the model before anything else is measured, so it comes first (for example [rotate, smoothquant, gptq])")
    if len(set(names)) != len(names) or (len(names) > 1 and names[-1] in ("none", "auto")):
        raise ValueError("a list of methods names each method once, and neither none nor auto")
    return tuple(names)


def _bytes(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    size = parse_size(value) if isinstance(value, str) else 0
    if not size:
        raise ValueError("a memory limit is a size such as 8GiB or 512MiB, or a number of bytes")
    return size


def _limit(value: str) -> str:
    parse_limit(value)
    return value


def _budget(value: str) -> str:
    parse_budget(value)
    return value


_SCHEME_SCHEMA = {"type": "string", "examples": ["int4-g64-sym", "int4-g128-asym", "int8-channel-sym", *PRESETS]}
_METHOD_SCHEMA = {"anyOf": [{"enum": list(METHODS)}, {"type": "array", "items": {"enum": list(METHODS)}, "minItems": 1, "uniqueItems": True}]}
SchemeText = Annotated[Scheme, PlainValidator(_scheme), PlainSerializer(str, return_type=str), WithJsonSchema(_SCHEME_SCHEMA)]
MethodList = Annotated[
    tuple[str, ...],
    PlainValidator(_methods),
    PlainSerializer(lambda names: names[0] if len(names) == 1 else list(names)),
    WithJsonSchema(_METHOD_SCHEMA),
]
Bytes = Annotated[int, PlainValidator(_bytes), WithJsonSchema({"type": ["string", "integer"], "examples": ["8GiB", "512MiB"]})]
Limit = Annotated[str, BeforeValidator(lambda v: _limit(v) if isinstance(v, str) else v), WithJsonSchema({"type": "string", "examples": ["<= 1.30", ">= 0.70"]})]
BudgetText = Annotated[
    str, BeforeValidator(lambda v: _budget(v) if isinstance(v, str) else v), WithJsonSchema({"type": "string", "examples": ["4.5 bits", "110 MB", "kl <= 0.05"]})
]
Listed = Strict(False)  # a YAML list may fill a tuple; its items stay strict
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A mapping of a recipe: frozen, unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
