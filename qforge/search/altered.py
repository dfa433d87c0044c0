"""Which weights of a candidate's artifact are other than its baseline's: what a comparison that failed names first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qforge.errors import QforgeError
from qforge.models.model import Model, open_model

MOST = 3


def altered(baseline: Model, candidate: Model) -> str | None:
    """Where the (dequantized) weights differ, relatively, most first; None where they do not, or have other names."""
    names = [n for n in candidate.weights.names() if n in set(baseline.weights.names())]
    found = sorted(((d, n) for n in names if (d := _difference(baseline, candidate, n)) > 0), reverse=True)
    if not found:
        return None
    most = ", ".join(f"{n.removesuffix('.weight')} ({d:.2g} of its norm)" for d, n in found[:MOST])
    return f"the artifacts' weights differ in {len(found)} of {len(names)} tensors{', most' if len(found) > MOST else ''}: {most}"


def altered_files(baseline: Path, results: Mapping[str, Any] | None, candidate: Path, others: Mapping[str, Any] | None) -> str | None:
    """The same of the artifacts that two results.json name, where both lie beside them and can be read."""
    folders = [path.parent / str(((r or {}).get("artifact") or {}).get("path") or "-") for path, r in ((baseline, results), (candidate, others))]
    if not all(f.is_dir() for f in folders):
        return None
    try:
        return altered(*(open_model(str(f)) for f in folders))
    except QforgeError as e:
        return f"the artifacts' weights cannot be compared: {e}"


def _difference(baseline: Model, candidate: Model, name: str) -> float:
    a, b = (m.weights.read(name).float() for m in (baseline, candidate))
    return float((b - a).norm() / a.norm().clamp_min(1e-30)) if a.shape == b.shape else float("inf")
