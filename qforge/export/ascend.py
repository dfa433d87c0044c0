"""Checkpoints for Ascend NPUs: `quant_model_description.json` beside the weights, as MindIE and vllm-ascend read what msmodelslim writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qforge.export.hf import weight_shape, write_checkpoint
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts.ascend import FILE, Ascend
from qforge.models.model import Model
from qforge.models.names import HEAD

_LOWEST_LAST = ("W8A16", "W8A8_DYNAMIC", "W4A16")  # a model of several kinds is called by the lowest, as msmodelslim does


@dataclass(frozen=True, slots=True)
class AscendExporter:
    """The exporter (see docs/architecture.md). config.json says nothing of the quantization: the description does."""

    name: str = "ascend"
    holds_kv_scales: ClassVar[bool] = False
    shard_bytes: int = SHARD_BYTES

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return "the model is not quantized, and an Ascend description tells of quantized weights"
        layout = Ascend()
        for name, scheme in model.schemes.items():
            reason = layout.supports(scheme) or layout.problem_with(scheme, *weight_shape(model, name))
            if reason:
                return f"{name}: {reason}"
        sizes = sorted({s.granularity.columns for s in model.schemes.values()} - {0})
        return f"an Ascend description has one group size, and this model has {' and '.join(map(str, sizes))}" if len(sizes) > 1 else None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("Ascend", self.check(model))
        told = {FILE: description(model)}
        return write_checkpoint(folder, model, Ascend(), lambda: told, shard_bytes=self.shard_bytes, stem="quant_model_weights")


def description(model: Model) -> Mapping[str, Any]:
    """The kind of each tensor by name, and what goes for the whole model."""
    layout, kinds = Ascend(), {}
    for name in [*model.weights.names(), f"{HEAD}.weight"]:
        module, _, part = name.rpartition(".")
        if module not in model.schemes or part != "weight":
            kinds[name] = "FLOAT"
            continue
        scheme = model.schemes[module]
        kinds |= dict.fromkeys((f"{module}.{p}" for p in layout.shapes(scheme, *weight_shape(model, module))), layout.kind(scheme))
    group = max(s.granularity.columns for s in model.schemes.values())
    whole = max((layout.kind(s) for s in model.schemes.values()), key=_LOWEST_LAST.index)
    return {**kinds, "version": "1.0.0", "model_quant_type": whole, "metadata": {}, "group_size": group, "optional": {}}
