"""Checkpoints for engines that cannot run here (TensorRT-LLM, Ascend), read back: what the safetensors package reads, unpacked a second time."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from qforge import numerics
from qforge.layouts import kv_cache
from qforge.models.model import Model
from qforge.qlinear import QuantizedLinear
from qforge.types import Verification

FORMATS = {
    "trtllm": "not executed: TensorRT-LLM needs an NVIDIA GPU, and none of its programs reads a checkpoint without one",
    "ascend": "not executed: MindIE and vllm-ascend need an Ascend NPU, and none of their programs reads a checkpoint without one",
}


def others(model: Model) -> set[str]:
    """Names of what a checkpoint holds beside the weights of quantized linears."""
    return {n for n in model.weights.names() if not (n.endswith(".weight") and n.removesuffix(".weight") in model.schemes)}


def verify_packed(format_name: str, folder: Path, model: Model) -> tuple[list[Verification], list[str]]:
    """Read a checkpoint back; see `verify.verify`."""
    unequal, seen = [], set()
    scales = kv_cache.packed("trtllm", model.kv_scales, torch.float32) if format_name == "trtllm" else {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            names = set(f.keys())
            for name in sorted(names):
                module, _, part = name.rpartition(".")
                if name in scales:
                    equal = torch.equal(f.get_tensor(name), scales[name])
                    seen.add(name)
                elif module in model.schemes and part != "bias":
                    if part != "weight":
                        continue
                    seen.add(module)
                    equal = _equal({n.rpartition(".")[2]: f.get_tensor(n) for n in names if n.rpartition(".")[0] == module}, model.linear(module))
                else:
                    equal = torch.equal(f.get_tensor(name), model.weights.read(name))
                    seen.add(name)
                if not equal:
                    unequal.append(name)
    wrong = [*unequal, *sorted({*model.schemes, *others(model), *scales} - seen)]
    note = f"unequal or missing: {', '.join(wrong[:3])}" if wrong else None
    return [Verification("qforge's second unpacking of what safetensors reads", version("safetensors"), weights_equal=not wrong, note=note)], [FORMATS[format_name]]


def _equal(tensors: Mapping[str, torch.Tensor], q: QuantizedLinear) -> bool:
    """Codes by whole bytes, as the formats' writers have it, times scales: the artifact's weight bit for bit? Factors and offsets of inputs that we do not have must be neutral."""
    weight, scales = tensors["weight"], next(t for n, t in tensors.items() if n.startswith("weight_scale"))
    codes = weight.float().numpy() if q.scheme.bits == 8 else _nibbles(weight.contiguous().view(torch.uint8).numpy(), q)
    spread = scales.float().reshape(q.scales.shape).numpy()
    for axis, size in enumerate(codes.shape):
        tile = -(-size // spread.shape[axis]) if axis or q.scheme.granularity.rows < 2 else q.scheme.granularity.rows
        spread = np.repeat(spread, tile, axis)
    expected = numerics.dequantize(q).numpy()
    neutral = all((t == (1 if n == "pre_quant_scale" else 0)).all() for n, t in tensors.items() if n in ("pre_quant_scale", "weight_offset"))
    same_input = q.input_scale is None or torch.equal(tensors["input_scale"], q.input_scale.reshape(()))
    return bool(neutral) and same_input and np.array_equal(codes * spread[: codes.shape[0], : codes.shape[1]], expected)


def _nibbles(data: np.ndarray, q: QuantizedLinear) -> np.ndarray:
    """4-bit codes `[O, I]`, signed: a byte holds neighbours of that dimension which has half as many."""
    codes = np.empty((q.out_features, q.in_features), np.float32)
    for place, half in enumerate((data & 15, data >> 4)):
        signed = half.astype(np.float32) - 16 * (half > 7)
        if data.shape[0] < q.out_features:
            codes[place::2] = signed
        else:
            codes[:, place::2] = signed
    return codes
