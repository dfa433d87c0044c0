"""What this machine has that matters to qforge: processor, memory, disk, GPU, packages, the native module. Looks, changes nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge import __version__
from qforge.machine_limits import memory_limit, usable_cores

_FEATURES = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")
_SCHEMES = ("int4-g128-sym", "int8-channel-sym", "w8a8-int8", "fp8-dynamic", "nf4")
_REINSTALL = "install qforge again: pip install qforge"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that qforge uses; `version` is None where it is not installed."""

    name: str
    version: str | None
    required: bool
    purpose: str
    get: str


_OPTIONAL = (
    ("xllamacpp", "runs every GGUF export in llama.cpp as its check", "pip install 'qforge[llamacpp]'"),
    ("onnx", "ONNX exports", "pip install 'qforge[onnx]'"),
    ("onnxruntime", "runs every ONNX export as its check", "pip install 'qforge[onnx]'"),
    ("onnxruntime-genai", "generates from every ONNX export as its check", "pip install 'qforge[genai]'"),
    ("openvino", "OpenVINO exports, and runs them as their check", "pip install 'qforge[openvino]'"),
    ("mlx", "runs every MLX export as its check", "pip install 'qforge[mlx]'"),
    ("mlx-lm", "the models that MLX runs", "pip install 'qforge[mlx]'"),
    ("bitsandbytes", "runs every NF4 export as its check", "pip install 'qforge[bitsandbytes]'"),
    ("tensorrt-rtx", "TensorRT engines for named GPU architectures", "pip install 'qforge[tensorrt]'"),
    ("tritonclient", "parses every Triton repository's config.pbtxt as its check", "pip install 'qforge[triton-server]'"),
    ("protobuf", "what tritonclient parses it with", "pip install 'qforge[triton-server]'"),
    ("triton", "the runtime's kernels for NVIDIA GPUs", "pip install 'qforge[gpu]'"),
    ("lm-eval", "tasks (evaluate.tasks)", "pip install 'qforge[eval]'"),
    ("starlette", "qforge serve", "pip install 'qforge[serve]'"),
    ("uvicorn", "the HTTP server of qforge serve", "pip install 'qforge[serve]'"),
    ("prometheus-client", "figures of qforge serve", "pip install 'qforge[serve]'"),
    ("ray", "calibration shared among processes and machines (run.workers)", "pip install 'qforge[ray]'"),
    ("datasets", "hub data sets as calibration or evaluation text", "pip install datasets"),
    ("peft", "a second opinion on LoRA merges (tests)", "pip install 'qforge[dev]'"),
)
_REQUIRED = (
    ("torch", "numerics, calibration, methods"),
    ("numpy", "bytes and sums"),
    ("transformers", "model configurations and modelling code"),
    ("tokenizers", "text to tokens"),
    ("safetensors", "weights"),
    ("accelerate", "model skeletons without memory"),
    ("huggingface-hub", "models from the hub"),
    ("compressed-tensors", "the artifact's layout"),
    ("gguf", "GGUF files"),
    ("greenlet", "calibration"),
    ("pydantic", "recipes, results"),
    ("annotated-types", "limits in the types of results"),
    ("pyyaml", "recipes"),
    ("click", "command line"),
    ("rich", "bars and tables"),
    ("jinja2", "reports"),
)


def describe_machine() -> dict[str, Any]:
    """Everything that `qforge doctor --json` says; `problems` are sentences with a way out."""
    packages = find_packages()
    native = _native()
    facts: dict[str, Any] = {
        "qforge_version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "architecture": platform.machine(), "cores": usable_cores(), "features": cpu_features()},
        "memory": _memory(),
        "disk": {"folder": ".", "free_bytes": shutil.disk_usage(".").free, "total_bytes": shutil.disk_usage(".").total},
        "gpus": _gpus(),
        "native": native,
        "kernels": _kernels(),
        "packages": [{"name": p.name, "version": p.version, "required": p.required, "purpose": p.purpose, "get": p.get} for p in packages],
    }
    return {**facts, "problems": _problems(packages, native), "ready": all(p.version for p in packages if p.required)}


def find_packages() -> list[Package]:
    """Required packages, then optional ones, each with its installed version."""
    required = [Package(name, _version(name), True, purpose, _REINSTALL) for name, purpose in _REQUIRED]
    return required + [Package(name, _version(name), False, purpose, get) for name, purpose, get in _OPTIONAL]


def cpu_features() -> list[str]:
    """Instruction set extensions that kernels care about, as the kernel of the operating system names them."""
    words = set(_proc_field("/proc/cpuinfo", "flags").split()) | set(_proc_field("/proc/cpuinfo", "Features").split())
    return [f for f in _FEATURES if f in words]


def _problems(packages: list[Package], native: dict[str, Any]) -> list[str]:
    problems = [f"{p.name} is not installed ({p.purpose}); {p.get}" for p in packages if p.version is None and p.required]
    if not native["present"]:
        problems.append(
            "the native module is missing: linears run on the plain PyTorch reference, slowly; install a C++20 compiler (g++ 11 or clang 14, or newer) and install qforge again"
        )
    return problems


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> dict[str, Any]:
    try:
        importlib.import_module("qforge.ops._native")
    except ImportError:
        return {"present": False, "instruction_sets": []}
    from qforge.ops.native_module import instruction_sets

    return {"present": True, "instruction_sets": instruction_sets()}


def _kernels() -> dict[str, dict[str, str]]:
    """By scheme and kind of activations: the kernel that the runtime takes here, and why not a faster one."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from qforge.ops.select import explained
    from qforge.scheme import parse

    return {scheme: explained(parse(scheme), (4096, 4096)) for scheme in _SCHEMES}


def _gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs that torch can use: name, memory in bytes, compute capability."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_bytes": p.total_memory, "compute_capability": f"{p.major}.{p.minor}"} for p in found]


def _cpu_model() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _memory() -> dict[str, int | None]:
    """Bytes: of the machine, free for new work, and the limit of the container (None without one)."""
    total, available = (_proc_field("/proc/meminfo", field).split() for field in ("MemTotal", "MemAvailable"))
    return {"total_bytes": int(total[0]) * 1024 if total else None, "available_bytes": int(available[0]) * 1024 if available else None, "limit_bytes": memory_limit()}


def _proc_field(path: str, field: str) -> str:
    """The first value of a field of a /proc file; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")
