"""The artifact's own layout as an export: other people's checkpoints written as compressed-tensors, or NF4 ones as bitsandbytes has them, with their integers unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qforge import __version__
from qforge.export.hf import write_artifact
from qforge.export.provenance import read_provenance
from qforge.export.refusal import refuse
from qforge.export.writer import SHARD_BYTES
from qforge.layouts import checkpoint
from qforge.models.model import Model
from qforge.scheme import Number


@dataclass(frozen=True, slots=True)
class ArtifactExporter:
    """The exporter (see docs/architecture.md); `name` is `compressed-tensors` or `bitsandbytes`."""

    name: str
    shard_bytes: int = SHARD_BYTES

    @property
    def holds_kv_scales(self) -> bool:
        """See `Exporter.holds_kv_scales`."""
        return self.name == "compressed-tensors"

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if not model.schemes:
            return f"the model is not quantized, and a {self.name} checkpoint holds quantized weights"
        for name, scheme in model.schemes.items():
            if (scheme.number is Number.NF4) != (self.name == "bitsandbytes"):
                return f"{name}: a {self.name} checkpoint does not hold {scheme}; " + ("it holds nf4" if self.name == "bitsandbytes" else "format bitsandbytes does")
        return checkpoint.problem(model.schemes.values(), model.dtype)

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write the checkpoint to `folder`, which it replaces.

        Raises:
            UnsupportedError: `check` says why not, or the groups are in activation order.
            OutputError: the folder cannot be written.
        """
        refuse(self.name, self.check(model))
        origin = read_provenance(model.assets) or {"qforge_version": __version__, "model": {"source": Path(model.source).name, "sha256": model.fingerprint()}}
        write_artifact(folder, model, model.schemes, model.linear, origin, kv_scales=model.kv_scales, shard_bytes=self.shard_bytes)
        return sorted(p for p in folder.rglob("*") if p.is_file())
