"""Whether an ONNX decoder is the one that its `genai_config.json` tells onnxruntime-genai of: inputs and outputs by name, their types and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, ValueInfoProto

from qforge.errors import ModelError
from qforge.models.config import read_json

CONFIG = "genai_config.json"
_IDS = ("input_ids", "attention_mask", "position_ids")
_PAST = ("past_key_names", "past_value_names")
_MOST_LAYERS = 4096


def check_genai(model: ModelProto, path: Path) -> None:
    """Refuse a decoder that onnxruntime-genai could not run by the `genai_config.json` beside it, if there is one.

    Raises:
        ModelError: it names what does not fit.
    """
    config = path.parent / CONFIG
    if not config.exists():
        return
    told = _mapping(read_json(config), "model", config)
    decoder = _mapping(told, "decoder", config)
    if decoder.get("filename") != path.name:
        return  # of a model in several files
    inputs, outputs = ({value.name: value for value in values} for values in (model.graph.input, model.graph.output))
    for name, kind in _named(decoder, "inputs", config):
        _check_input(name, kind, inputs.get(name), decoder, config)
    for name, kind in _named(decoder, "outputs", config):
        if name not in outputs:
            raise ModelError(f"{config} names the output '{name[:80]}', and {path.name} has none of that name")
        if kind == "logits" and _sizes(outputs[name])[-1:] not in ([], [None], [told.get("vocab_size")]):
            raise ModelError(f"{config} tells of {told.get('vocab_size')!r:.40} tokens, and '{name[:80]}' of {path.name} has {_sizes(outputs[name])[-1]}")


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = config.get(key)
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no '{key}' that is an object; onnxruntime-genai needs one")
    return found


def _named(decoder: Mapping[str, Any], key: str, path: Path) -> Iterator[tuple[str, str]]:
    """Names in the graph, with what each is for; `%d` stands for every layer."""
    layers = decoder.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        raise ModelError(f"{path} tells of {layers!r:.40} layers")
    for kind, name in _mapping(decoder, key, path).items():
        if not isinstance(name, str):
            raise ModelError(f"{path}: '{kind[:80]}' is {name!r:.40}, where a name is needed")
        yield from ((name.replace("%d", str(i)), kind) for i in range(layers if "%d" in name else 1))


def _check_input(name: str, kind: str, found: ValueInfoProto | None, decoder: Mapping[str, Any], path: Path) -> None:
    if found is None:
        raise ModelError(f"{path} names the input '{name[:80]}', and {decoder['filename']} has none of that name")
    stored = found.type.tensor_type.elem_type
    if kind in _IDS and stored not in (TensorProto.INT32, TensorProto.INT64):
        raise ModelError(f"{path}: the input '{name[:80]}' of {decoder['filename']} is of type {TensorProto.DataType.Name(stored)}, where integers are needed")
    if kind in _PAST:
        sizes, wanted = _sizes(found), [None, decoder.get("num_key_value_heads"), None, decoder.get("head_size")]
        if len(sizes) != 4 or any(None not in pair and pair[0] != pair[1] for pair in zip(sizes, wanted, strict=True)):
            raise ModelError(f"{path}: the cache '{name[:80]}' of {decoder['filename']} has the sizes {sizes[:8]}, where {wanted} are told of")


def _sizes(value: ValueInfoProto) -> list[int | None]:
    """Of a value, None for those that are found at run time."""
    return [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
