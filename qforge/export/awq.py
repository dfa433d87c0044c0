"""AWQ checkpoints (AutoAWQ's GEMM packing, which GPTQModel, transformers and vLLM read), with the artifact's integers unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qforge.export.gptq import left_alone
from qforge.export.hf import unquantized_linears, weight_shape, write_checkpoint
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts.autoawq import AutoAwq
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.scheme import Per, Scheme


@dataclass(frozen=True, slots=True)
class AwqExporter:
    """The exporter (see docs/architecture.md). The format has one group size for the whole model, 4 bits, and an unquantized head."""

    name: str = "awq"
    holds_kv_scales: ClassVar[bool] = False
    shard_bytes: int = SHARD_BYTES

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return "the model is not quantized, and an AWQ checkpoint holds quantized weights"
        layout = AutoAwq()
        for name, scheme in model.schemes.items():
            reason = layout.supports(scheme) or layout.problem_with(weight_shape(model, name)[0])
            if reason:
                return f"{name}: {reason}"
        if HEAD in model.schemes:
            return f"{HEAD} is quantized, and readers of AWQ checkpoints take it to be unquantized; add it to quantize.ignore, or export gptq"
        sizes = {_group_size(s) for s in model.schemes.values()}
        return f"an AWQ checkpoint has one group size, and this model has {', '.join(map(str, sorted(sizes)))}; export gptq holds them" if len(sizes) > 1 else None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or a value does not fit (a scale that is not exact in fp16, groups in activation order).
            OutputError: the folder cannot be written.
        """
        refuse("AWQ", self.check(model))
        settings = quantization_config(model.schemes, unquantized_linears(model, model.schemes))
        return write_checkpoint(folder, model, AutoAwq(), lambda: {"config.json": {"quantization_config": settings}}, shard_bytes=self.shard_bytes)


def quantization_config(schemes: Mapping[str, Scheme], unquantized: list[str]) -> dict[str, Any]:
    """What config.json says of the quantization. `zero_point` is true for symmetric weights, too: their zero points are stored, and all 8.

    What is left alone is said twice: GPTQModel 7.6 does not look into `modules_to_not_convert`, and takes missing codes for zeros.
    """
    skipped = [name for name in unquantized if name != HEAD]
    rules = {"dynamic": left_alone(skipped)} if skipped else {}
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _group_size(next(iter(schemes.values()))),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": skipped or None,
        **rules,
    }


def _group_size(scheme: Scheme) -> int:
    return scheme.granularity.columns if scheme.granularity.per is Per.GROUP else -1
