"""A Triton model repository read back: its configuration by Triton's own protobuf schema, and the model within by the engine that Triton would run it with."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from qforge.engines.base import Scorer
from qforge.errors import MissingCapabilityError, ModelError
from qforge.export.triton_server import CHECKPOINT, CONFIG, ENGINE, MODEL, VERSION
from qforge.export.verify_checkpoint import verify_checkpoint
from qforge.models.model import Model
from qforge.types import Verification

_ORT = {"TYPE_FP32": "tensor(float)", "TYPE_FP16": "tensor(float16)", "TYPE_INT64": "tensor(int64)"}
SERVER = "not executed: Triton's server itself"


def verify_triton(folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read a repository back; arguments and answer as `verify.verify`, `folder` the repository."""
    inner = folder / MODEL / VERSION
    if (inner / ENGINE).exists():
        done, left_out = verify_checkpoint("compressed-tensors", inner / CHECKPOINT, model, scorer, prompts)
        done = [*done, Verification("json package", sys.version.split()[0], note=f"model.json names {json.loads((inner / ENGINE).read_text())['model']}")]
    else:
        from qforge.export.verify_onnx import verify_onnx

        done, left_out = verify_onnx(inner, model, scorer, prompts)
    try:
        return [*done, verify_config(folder)], [*left_out, SERVER]
    except MissingCapabilityError as e:
        return done, [*left_out, str(e), SERVER]


def verify_config(folder: Path) -> Verification:
    """Parse `config.pbtxt` by Triton's schema, and compare what it says of inputs and outputs with what ONNX Runtime finds in the file.

    Raises:
        MissingCapabilityError: tritonclient, which has the schema, is not installed.
        ModelError: the schema refuses the file, or it says other than the model.
    """
    config = parsed(folder / MODEL / CONFIG)
    if config.name != MODEL:
        raise ModelError(f"{CONFIG} names the model {config.name}, and its folder is {MODEL}")
    note = f"backend {config.backend}"
    if config.backend == "onnxruntime":
        told = [[(e.name, _ORT[_kind(e)], list(e.dims)) for e in ends] for ends in (config.input, config.output)]
        found = _found(folder / MODEL / VERSION / config.default_model_filename)
        if told != found:
            raise ModelError(f"{CONFIG} does not say what the ONNX file's inputs and outputs are")
        note += f"; {len(told[0])} inputs and {len(told[1])} outputs as ONNX Runtime finds them"
    return Verification("tritonclient's protobuf schema", version("tritonclient"), note=note)


def _kind(end: Any) -> str:
    """The name of an input's or output's type."""
    return str(end.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[end.data_type].name)


def _found(path: Path) -> list[list[tuple[str, str, list[int]]]]:
    from qforge.engines import onnx_runtime

    session = onnx_runtime.session(str(path))
    return [[(e.name, e.type, [d if isinstance(d, int) else -1 for d in e.shape]) for e in ends] for ends in (session.get_inputs(), session.get_outputs())]


def client_missing() -> str | None:
    """Why `config.pbtxt` cannot be parsed here, and what to do; None if it can."""
    return None if _client() is not None else "config.pbtxt was not parsed: tritonclient is not installed here: pip install 'qforge[triton-server]'"


def _client() -> Path | None:
    package = importlib.util.find_spec("tritonclient")
    return None if package is None or package.origin is None else Path(package.origin).parent


def parsed(path: Path) -> Any:
    """A `config.pbtxt` as Triton's `ModelConfig` message.

    Raises:
        MissingCapabilityError: tritonclient is not installed.
        ModelError: the schema refuses the file.
    """
    client = _client()
    if client is None:
        raise MissingCapabilityError(str(client_missing()))
    schema = client / "grpc" / "model_config_pb2.py"  # alone: the package beside it imports grpc
    spec = importlib.util.spec_from_file_location("model_config_pb2", schema)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from google.protobuf import text_format

    try:
        return text_format.Parse(path.read_text(), module.ModelConfig())
    except text_format.ParseError as e:
        raise ModelError(f"Triton's schema refuses {path.name}: {e}") from e
