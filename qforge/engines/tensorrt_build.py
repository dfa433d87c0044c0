"""TensorRT engines from an ONNX export: ahead of time for named GPU architectures by TensorRT-RTX, which needs no GPU, or by TensorRT for the GPU that is here."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qforge.errors import MissingCapabilityError, ModelError
from qforge.files import atomic, cache_folder, sha256_file
from qforge.models.cache import cached_folder
from qforge.types import ModelSpec

# What TensorRT-RTX 1.7 can be told to build for; Hopper (SM90) is not among them.
ARCHITECTURES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
RTX, FULL = "tensorrt_rtx", "tensorrt"
ENGINE = "model.engine"


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes that an engine takes: it is fastest at the second of each three, and refuses what lies outside."""

    batch: tuple[int, int, int]
    new: tuple[int, int, int]
    cached: tuple[int, int, int]

    def shapes(self, name: str, spec: ModelSpec) -> list[tuple[int, ...]]:
        """Smallest, best and largest shape of an input of the graph."""
        rows = zip(self.batch, self.new, self.cached, strict=True)
        if name.startswith("past_key_values."):
            return [(b, spec.num_kv_heads, p, spec.head_dim) for b, _, p in rows]
        return [(b, s + p if name == "attention_mask" else s) for b, s, p in rows]


def profiles(spec: ModelSpec) -> list[Profile]:
    """One for reading a prompt and one for writing token by token; up to 8 sequences, and contexts of at most 8,192 tokens."""
    context = min(spec.max_positions, 8192)
    middle = context // 2
    return [Profile((1, 1, 8), (1, middle, context), (0, 0, 0)), Profile((1, 1, 8), (1, 1, 1), (0, middle, context - 1))]


def missing(targets: Sequence[str]) -> str | None:
    """Why no engine can be built here for `targets` (none: the GPU that is here), and what to do; None if it can."""
    if targets:
        get = "pip install 'qforge[tensorrt]' (it builds without a GPU)"
        return None if importlib.util.find_spec(RTX) is not None else f"TensorRT-RTX is not installed here: {get}"
    named = f"or name GPU architectures, for which TensorRT-RTX builds without a GPU: type {ARCHITECTURES[3]}, or several, as in sm89+sm120"
    import torch

    if not torch.cuda.is_available():
        return f"there is no NVIDIA GPU here for which TensorRT could build; run this on the machine that will serve, {named}"
    return None if importlib.util.find_spec(FULL) is not None else f"TensorRT is not installed here: pip install tensorrt, {named}"


def build(folder: Path, spec: ModelSpec, targets: Sequence[str]) -> Path:
    """The engine of an ONNX export, from the cache where the same file was built for the same targets by the same version before.

    Args:
        folder: holds `model.onnx` and its data.
        spec: of the model.
        targets: GPU architectures; none builds for the GPU that is here.

    Raises:
        MissingCapabilityError: this machine lacks what it needs, or the cache cannot be written.
        ModelError: TensorRT refuses the graph; the message is its own.
    """
    reason = missing(targets)
    if reason is not None:
        raise MissingCapabilityError(reason)
    trt = importlib.import_module(RTX if targets else FULL)
    shapes = profiles(spec)
    parts = [trt.__name__, trt.__version__, *targets, _gpu(targets), json.dumps([asdict(p) for p in shapes]), *(sha256_file(p) for p in sorted(folder.glob("model.onnx*")))]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def make(place: Path) -> None:
        (place / ENGINE).write_bytes(_built(trt, folder / "model.onnx", spec, shapes, targets))

    return cached_folder("tensorrt", key, make) / ENGINE


def _gpu(targets: Sequence[str]) -> str:
    """The name of the GPU that an engine is built for; engines of TensorRT fit no other."""
    if targets:
        return ""
    import torch

    return str(torch.cuda.get_device_name())


def _built(trt: Any, path: Path, spec: ModelSpec, shapes: Sequence[Profile], targets: Sequence[str]) -> bytes:
    log = logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(path)):
        raise ModelError(f"TensorRT cannot read {path.name}: {'; '.join(parser.get_error(i).desc() for i in range(parser.num_errors))}")
    config = builder.create_builder_config()
    if targets:
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
    for p in shapes:
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            profile.set_shape(network.get_input(i).name, *p.shapes(network.get_input(i).name, spec))
        config.add_optimization_profile(profile)
    timings = None if targets else _timings(trt, config)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ModelError(f"TensorRT cannot build {path.name}: {'; '.join(log.said[-3:]) or 'it does not say why'}")
    if timings is not None:
        with atomic(timings) as temporary:
            temporary.write_bytes(bytes(config.get_timing_cache().serialize()))
    return bytes(plan)


def logger(trt: Any) -> Any:
    """A logger that keeps what TensorRT says of errors, for the message."""

    class Log(trt.ILogger):  # type: ignore[misc]
        said: list[str]

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.said = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.said.append(message)

    return Log()


def _timings(trt: Any, config: Any) -> Path:
    """Give the builder what earlier builds for this GPU measured; the file that keeps it."""
    name = hashlib.sha256(f"{trt.__version__} {_gpu(())}".encode()).hexdigest()[:16]
    path = cache_folder() / "tensorrt" / f"timings-{name}.cache"
    config.set_timing_cache(config.create_timing_cache(path.read_bytes() if path.exists() else b""), ignore_mismatch=False)
    return path
