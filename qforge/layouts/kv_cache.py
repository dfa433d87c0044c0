"""Scales of keys and values that are kept as FP8 E4M3, one of each for a layer: what a checkpoint says of them, and what their tensors are called.

compressed-tensors 0.20 (and vLLM): `kv_cache_scheme`, and `k_scale` and `v_scale` of the attention module. Model Optimizer (TensorRT-LLM): `kv_cache_quant_algo: FP8`, and
`k_proj.k_scale` and `v_proj.v_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from qforge.errors import ModelError
from qforge.types import KvScales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ALGORITHM = "FP8"
_DEFAULTS = SCHEME | {"type": "int"}  # of compressed-tensors' QuantizationArgs
_NAMES = {"compressed-tensors": ("k_scale", "v_scale"), "trtllm": ("k_proj.k_scale", "v_proj.v_scale")}  # in an attention module


def described(method: str, config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's configuration says that keys and values are kept so.

    Args:
        method: what wrote it, as `quant_method` has it.
        config: `quantization_config`, or what `hf_quant_config.json` says.

    Raises:
        ModelError: it tells of another kind of cache.
    """
    told = config.get("kv_cache_scheme") if method == "compressed-tensors" else config.get("kv_cache_quant_algo") if method == "trtllm" else None
    if told is None:
        return False
    if told == ALGORITHM or (isinstance(told, Mapping) and {key: usual if told.get(key) is None else told[key] for key, usual in _DEFAULTS.items()} == SCHEME):
        return True
    raise ModelError(
        f"this checkpoint keeps keys and values as {told!r}, which qforge does not read; it reads FP8 with calibrated scales, one for all keys of a layer and one for all values"
    )


def names(method: str, modules: Iterable[str]) -> list[str]:
    """The tensors' names for attention modules, the key's before the value's."""
    return [f"{module}.{name}" for module in modules for name in _NAMES[method]]


def packed(method: str, scales: KvScales, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors `[1]`."""
    found = {name: torch.tensor([scale], dtype=dtype) for name, scale in zip(names(method, scales), (s for pair in scales.values() for s in pair), strict=True)}
    assert all(float(t) == s for t, s in zip(found.values(), (s for pair in scales.values() for s in pair), strict=True)), f"scales are not exact in {dtype}"
    return found


def unpacked(method: str, held: Iterable[str], read: Callable[[str], torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Scales by attention module.

    Args:
        method: as above.
        held: names of all tensors of the checkpoint.
        read: gives one.

    Raises:
        ModelError: one is missing, is no single number, or cannot be a scale.
    """
    stored = set(held)
    modules = dict.fromkeys(name.removesuffix(f".{end}") for name in sorted(stored) for end in _NAMES[method] if name.endswith(f".{end}"))
    missing = [name for name in names(method, modules) if name not in stored]
    if missing or not modules:
        raise ModelError(f"keys and values are kept as FP8, but the files hold no {missing[0] if missing else ' and no '.join(_NAMES[method])}")
    return {module: (_scale(read, key), _scale(read, value)) for module in modules for key, value in [names(method, [module])]}


def _scale(read: Callable[[str], torch.Tensor], name: str) -> float:
    tensor = read(name)
    if tensor.shape not in ((), (1,)) or not tensor.is_floating_point():
        raise ModelError(f"'{name}' is {tensor.dtype} {list(tensor.shape)}; the scale of all keys or values of a layer is one floating-point number")
    found = float(tensor)
    if not math.isfinite(found) or found <= 0:
        raise ModelError(f"'{name}' is {found}; a scale is finite and greater than 0")
    return found
