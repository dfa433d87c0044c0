"""JSON Schemas of the files that programs read, from the dataclasses that they are written from."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from qforge.evaluate.compare import Comparison
from qforge.search.sweep import Sweep
from qforge.types import Results

_INTERVAL = {"anyOf": [{"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, {"type": "null"}]}
_FIGURES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "perplexity": {"type": "number", "exclusiveMinimum": 0},
        "perplexity_ci95": _INTERVAL,
        "nll": {"type": "number"},
        "bits_per_byte": {"type": "number"},
        "bits_per_byte_ci95": _INTERVAL,
    },
    "required": ["perplexity", "nll"],
    "additionalProperties": False,
}
_ARTIFACT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "sha256": {"type": "string"},
        "size_bytes": {"type": "integer", "minimum": 0},
        "bits_per_weight": {"type": "number", "minimum": 0},
    },
    "required": ["path", "sha256", "size_bytes", "bits_per_weight"],
}


def results() -> str:
    """The text of results.schema.json."""
    schema = _closed(TypeAdapter(Results).json_schema())
    schema["properties"]["artifact"] = _ARTIFACT
    properties = schema["$defs"]["Evaluation"]["properties"]
    properties["candidate"] = _FIGURES
    properties["reference"] = properties["base"] = {"anyOf": [_FIGURES, {"type": "null"}]}
    return _text(schema, "results")


def comparison() -> str:
    """The text of comparison.schema.json."""
    return _text(_closed(TypeAdapter(Comparison).json_schema()), "comparison")


def sweep() -> str:
    """The text of sweep.schema.json."""
    return _text(_closed(TypeAdapter(Sweep).json_schema()), "sweep")


def _closed(schema: Any) -> Any:
    """The same, with every field required (they are always written), no others allowed, and without titles and defaults."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {k: {n: _closed(p) for n, p in v.items()} if k in ("properties", "$defs") else _closed(v) for k, v in schema.items() if k not in ("title", "default")}
    if "properties" in made:
        made |= {"required": list(made["properties"]), "additionalProperties": False}
    return made


def _text(schema: dict[str, Any], name: str) -> str:
    version = schema["properties"]["schema_version"] = {"const": 1}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"qforge {name}.json, version {version['const']}"}
    return json.dumps({**head, **schema}, indent=1) + "\n"
