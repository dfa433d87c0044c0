"""Untrusted ONNX and OpenVINO graphs, opened by their engines in a separate process, because a damaged one can crash it."""

from __future__ import annotations

from pathlib import Path

from qforge import apart
from qforge.engines import onnx_runtime, openvino_runtime
from qforge.errors import ModelError

_SECONDS, _BYTES = 4, 8 << 30  # of computing and of address space, most of it reserved and never used
_SECONDS_PER_BYTE, _BYTES_PER_BYTE = 1 / (32 << 20), 4


def check_opens(engine: str, path: Path, size: int) -> None:
    """Refuse what an engine refuses, or ends with; it knows every operator's types and shapes.

    Args:
        engine: `onnxruntime` or `openvino`, installed.
        path: of the graph.
        size: bytes of it and of the data beside it.

    Raises:
        ModelError: the engine's own words.
    """
    function = {onnx_runtime.NAME: "open_onnx", openvino_runtime.NAME: "open_openvino"}[engine]
    found = apart.problem(f"{__name__}:{function}", [str(path)], int(_SECONDS + size * _SECONDS_PER_BYTE), _BYTES + size * _BYTES_PER_BYTE)
    if found is not None:
        raise ModelError(found if found.startswith(f"{engine} refuses") else f"{engine} cannot open {path}: {found}")


def open_onnx(path: str, told: bytes) -> None:
    """Open a graph in ONNX Runtime; runs in the separate process."""
    onnx_runtime.session(path, optimized=False)


def open_openvino(path: str, told: bytes) -> None:
    """Open a graph in OpenVINO; runs in the separate process."""
    openvino_runtime.read(Path(path).parent)
