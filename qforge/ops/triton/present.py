"""Whether Triton kernels run here, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton 3.9 does anyway, with a warning


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU: what its variable said when the process started."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: str) -> str | None:
    """None, or why no Triton kernel runs on tensors of this device."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install 'qforge[gpu]'"
    if interpreted():
        return None
    if not device.startswith("cuda"):
        return "it runs on NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0, this GPU has {major}.{minor}"


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability, 90 for 9.0; 90 in the interpreter."""
    if interpreted():
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 in the interpreter."""
    return 4 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)
