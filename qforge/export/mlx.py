"""MLX checkpoints: the artifact's integers for mlx-lm, on Apple's machines and on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qforge.export.hf import weight_shape, write_checkpoint
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts.mlx import Mlx
from qforge.models.model import Model


@dataclass(frozen=True, slots=True)
class MlxExporter:
    """The exporter (see docs/architecture.md)."""

    name: str = "mlx"
    holds_kv_scales: ClassVar[bool] = False
    shard_bytes: int = SHARD_BYTES

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return "the model is not quantized; mlx-lm loads the plain checkpoint as it is"
        for name, scheme in model.schemes.items():
            reason = Mlx().supports(scheme) or Mlx().problem_with(*weight_shape(model, name))
            if reason:
                return f"{name}: {reason}"
        return None

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse("MLX", self.check(model))
        return write_checkpoint(folder, model, Mlx(), lambda: {"config.json": {"quantization": _settings(model)}}, shard_bytes=self.shard_bytes)


def _settings(model: Model) -> Mapping[str, Any]:
    """`quantization` of config.json: the commonest bits and block, and by name every linear that has others."""
    own = {name: (Mlx.block(scheme, weight_shape(model, name)[1]), scheme.bits) for name, scheme in model.schemes.items()}
    common = Counter(own.values()).most_common(1)[0][0]
    named = {name: {"group_size": found[0], "bits": found[1]} for name, found in own.items() if found != common}
    return {"group_size": common[0], "bits": common[1], "mode": "affine", **named}
