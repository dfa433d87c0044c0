"""Checkpoints that TensorRT-LLM loads: a Hugging Face directory with `hf_quant_config.json`, as Model Optimizer writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from qforge import __version__
from qforge.export.hf import cache_pieces, unquantized_linears, weight_shape, write_checkpoint
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts.kv_cache import ALGORITHM
from qforge.layouts.trtllm import FILE, TrtLlm
from qforge.models.model import Model
from qforge.models.names import HEAD


@dataclass(frozen=True, slots=True)
class TrtLlmExporter:
    """The exporter (see docs/architecture.md)."""

    name: str = "trtllm"
    holds_kv_scales: ClassVar[bool] = True
    shard_bytes: int = SHARD_BYTES

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return "the model is not quantized; TensorRT-LLM loads the plain checkpoint as it is"
        layout = TrtLlm(model.dtype)
        for name, scheme in model.schemes.items():
            reason = layout.supports(scheme) or layout.problem_with(scheme, weight_shape(model, name)[0])
            if reason:
                return f"{name}: {reason}"
        if HEAD in model.schemes:
            return f"{HEAD} is quantized, and TensorRT-LLM loads output heads unquantized; leave it out (ignore: [{HEAD}])"
        if model.dtype not in (torch.float16, torch.bfloat16):
            return "TensorRT-LLM computes in 16 bits, and this model is stored in float32; use model.dtype: bfloat16 or float16"
        names = set(model.weights.names())
        fused = next((module for module in model.kv_scales if f"{module}.k_proj.weight" not in names), None)
        if fused is not None:
            return f"scales of keys and values are stored with k_proj and v_proj, and {fused} has none of its own; use quantize.kv_cache: null"
        kinds = sorted({str(s) for s in model.schemes.values()})
        return f"one scheme for all linears is written here, and this model has {' and '.join(kinds)}" if len(kinds) > 1 else None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("TensorRT-LLM", self.check(model))
        told = {FILE: settings(model)}
        return write_checkpoint(folder, model, TrtLlm(model.dtype), lambda: told, shard_bytes=self.shard_bytes, more=cache_pieces("trtllm", model.kv_scales, torch.float32))


def settings(model: Model) -> dict[str, Any]:
    """What `hf_quant_config.json` says."""
    scheme = next(iter(model.schemes.values()))
    cache = ALGORITHM if model.kv_scales else None
    told: dict[str, Any] = {"quant_algo": TrtLlm.algorithm(scheme), "kv_cache_quant_algo": cache, "exclude_modules": unquantized_linears(model, model.schemes)}
    if scheme.bits == 4:
        told |= {"group_size": scheme.granularity.columns, "has_zero_point": False, "pre_quant_scale": True}
    elif scheme.granularity.rows > 1:
        told["group_size"] = scheme.granularity.columns
    return {"producer": {"name": "qforge", "version": __version__}, "quantization": told}
