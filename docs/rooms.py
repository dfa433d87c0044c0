"""The drawing of docs/architecture.md: the rooms of qforge from top to bottom, as the import contract in pyproject.toml has them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "qforge"


def drawing(project: Path) -> str:
    """Layers of a pyproject.toml, the highest first; rooms that may be missing, in brackets there, are left out where they are."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return "\n".join(f"    {_there(layer)}" for layer in layers)


def _there(layer: str) -> str:
    (joint,) = set(re.findall(r" [|:] ", layer)) or {""}
    rooms = layer.split(joint) if joint else [layer]
    return joint.join(room.strip("()") for room in rooms if not room.startswith("(") or (PACKAGE / room.strip("()")).is_dir())
