"""The variants that a recipe's `sweep` asks for: each a name and the fields that it changes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from qforge.recipe.fields import Listed, Section, Text

FIXED = ("version", "sweep", "model", "adapters", "evaluate")  # what all members share: they are compared with one original, on one text
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


class MemberSection(Section):
    """One variant."""

    name: Text | None = Field(None, description="What tables and its folder call it; null makes a name from the values.")
    set: dict[Text, Any] = Field(description="Fields that it changes, by key path: {quantize.method: rtn}.")


class SweepSection(Section):
    """Variants of a recipe, run together over one model."""

    matrix: dict[Text, Annotated[tuple[Any, ...], Listed, Field(min_length=1)]] = Field(
        {}, description="Key paths and the values of each; every combination is a variant.", examples=[{"quantize.method": ["rtn", "gptq"]}]
    )
    include: Annotated[tuple[MemberSection, ...], Listed] = Field((), description="Further variants, one by one.")

    @model_validator(mode="after")
    def _members_differ(self) -> SweepSection:
        names = [name for name, _ in members(self)]
        if not names:
            raise ValueError("a sweep has a matrix (quantize.method: [rtn, gptq]) or include (a list of {set: {...}}), or both")
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two variants are called {twice[0]}; give one of them another name, or remove it")
        fixed = [path for _, changes in members(self) for path in changes if path.split(".")[0] in FIXED]
        if fixed:
            raise ValueError(f"{fixed[0]} cannot differ between variants: they are compared with one original on one text; run two sweeps")
        return self


def members(section: SweepSection) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changed fields (key path -> value) of every variant: the matrix's combinations, then the included ones, in the order of the file."""
    paths = list(section.matrix)
    for values in itertools.product(*section.matrix.values()) if paths else ():
        yield _name(values), dict(zip(paths, values, strict=True))
    for member in section.include:
        yield _safe(member.name) if member.name is not None else _name(list(member.set.values())), dict(member.set)


def overrides(changes: dict[str, Any]) -> list[str]:
    """The same as texts `key.path=value` (JSON, which is YAML)."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def _name(values: Sequence[Any]) -> str:
    return _safe("-".join("+".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in values))


def _safe(name: str) -> str:
    """A name that a folder can have."""
    return _UNSAFE.sub("_", name).strip("._") or "variant"
