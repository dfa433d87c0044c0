"""Values as YAML that means the same by 1.2's core schema, as recipes are read, and by 1.1, as PyYAML reads: `0E0` is a number to the one, `on` a truth value to the other."""

from __future__ import annotations

import re
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
CORE = [  # of YAML 1.2: type, pattern of a plain scalar, first characters
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", "~nN"),
]


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either schema takes for something else."""


def add_core(into: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    """Let plain scalars be what the core schema says, after what `into` knows already."""
    for name, pattern, first in CORE:
        into.add_implicit_resolver(TAG + name, re.compile(rf"(?:{pattern})\Z"), [*first, *([""] if name == "null" else [])])


add_core(_Dumper)


def yaml_text(value: Any) -> str:
    """Mappings in the order that they have."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
