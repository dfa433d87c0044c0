"""qforge.json: how an artifact was made, as a file beside it tells; what a model card quotes of it has the right types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qforge.errors import ModelError
from qforge.models.config import read_json

PROVENANCE = "qforge.json"


class _Source(BaseModel):
    source: str
    parameters: int | None = None


class _Calibration(BaseModel):
    tokens: int | None = None


class _Layer(BaseModel):
    name: str
    scheme: str | None
    relative_error: float | None = None


class _Provenance(BaseModel):
    model: _Source | None = None
    adapters: list[_Source] | None = None
    quantize: dict[str, Any] | None = None
    calibration: _Calibration | None = None
    bits_per_weight: float = 0.0
    layers: list[_Layer] | None = None


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What qforge.json of a checkpoint says; None where there is none.

    Raises:
        ModelError: it is damaged.
    """
    path = folder / PROVENANCE
    if not path.exists():
        return None
    found = read_json(path)
    try:
        _Provenance.model_validate(found)
    except ValidationError as e:
        first = e.errors()[0]
        raise ModelError(f"{path} is not what qforge writes: {'.'.join(map(str, first['loc']))}: {first['msg']}") from e
    return found
