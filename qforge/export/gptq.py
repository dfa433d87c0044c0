"""GPTQ checkpoints (AutoGPTQ's format, which GPTQModel, vLLM, optimum and ONNX Runtime's builders read), with the artifact's integers unchanged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from qforge import __version__
from qforge.export.hf import unquantized_linears, weight_shape, write_checkpoint
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts.autogptq import AutoGptq
from qforge.models.model import Model
from qforge.models.names import HEAD, JOINT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per, Scheme

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GptqExporter:
    """The exporter (see docs/architecture.md).

    Symmetric checkpoints are written as `checkpoint_format: gptq` (version 1, which every reader knows), asymmetric ones as `gptq_v2`:
    version 1 stores zero points minus one and cannot hold zero.
    """

    name: str = "gptq"
    holds_kv_scales: ClassVar[bool] = False
    shard_bytes: int = SHARD_BYTES

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return "the model is not quantized, and a GPTQ checkpoint holds quantized weights"
        layout = layout_for(model.schemes)
        for name, scheme in model.schemes.items():
            reason = layout.supports(scheme) or layout.problem_with(*weight_shape(model, name), scheme.bits)
            if reason:
                return f"{name}: {reason}"
        if len({s.symmetric for s in model.schemes.values()}) > 1:
            return "a GPTQ checkpoint is symmetric or asymmetric as a whole, and this model has layers of both kinds"
        return None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or a value does not fit (a scale that is not exact in fp16).
            OutputError: the folder cannot be written.
        """
        refuse("GPTQ", self.check(model))
        layout = layout_for(model.schemes)
        ordered = False

        def pack(q: QuantizedLinear) -> dict[str, torch.Tensor]:
            nonlocal ordered
            ordered = ordered or q.group_index is not None
            return layout.pack(q)

        def told() -> dict[str, dict[str, Any]]:
            settings = quantization_config(model.schemes, unquantized_linears(model, model.schemes), desc_act=ordered)
            return {"config.json": {"quantization_config": settings}, "quantize_config.json": settings}  # for readers that do not look into config.json

        return write_checkpoint(folder, model, layout, told, shard_bytes=self.shard_bytes, pack=pack)


def layout_for(schemes: Mapping[str, Scheme]) -> AutoGptq:
    """Version 1 for symmetric schemes, version 2 for asymmetric ones."""
    return AutoGptq(1 if all(s.symmetric for s in schemes.values()) else 2)


def quantization_config(schemes: Mapping[str, Scheme], unquantized: list[str], *, desc_act: bool) -> dict[str, Any]:
    """What config.json says of the quantization: the commonest scheme, and by GPTQModel's `dynamic` rules every linear of a block that differs from it, under the names of vLLM's
    joint linears as well."""
    common = Counter(_settings(s) for s in schemes.values()).most_common(1)[0][0]
    bits, group_size = common
    skipped = [name for name in unquantized if name != HEAD]
    others = {name: _settings(scheme) for name, scheme in schemes.items() if _settings(scheme) != common}
    rules = left_alone([*skipped, *_joint(dict.fromkeys(skipped))])
    rules |= {f"+:^{re.escape(name)}$": {"bits": b, "group_size": size} for name, (b, size) in (others | _joint(others)).items()}
    symmetric = all(s.symmetric for s in schemes.values())
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": desc_act,
        "static_groups": False,
        "true_sequential": True,
        "damp_percent": 0.01,
        "lm_head": HEAD in schemes,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"qforge:{__version__}"]},
    }
    return config | ({"dynamic": rules} if rules else {})


def _joint(settings: Mapping[str, _T]) -> dict[str, _T]:
    """Settings of the linears that vLLM makes of several, by whose names it looks rules up; of those alone whose parts all have the same."""
    found = {}
    for name in settings:
        for joint, parts in JOINT.items():
            block = name.removesuffix(parts[0])
            own = [f"{block}{part}" for part in parts]
            if block != name and all(n in settings and settings[n] == settings[name] for n in own):
                found[f"{block}{joint}"] = settings[name]
    return found


def left_alone(names: Sequence[str]) -> dict[str, dict[str, int]]:
    """GPTQModel's rules for linears that are not quantized."""
    return {f"-:^{re.escape(name)}$": {} for name in names}


def _settings(scheme: Scheme) -> tuple[int, int]:
    return scheme.bits, scheme.granularity.columns if scheme.granularity.per is Per.GROUP else -1
