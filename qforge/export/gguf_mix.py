"""GGUF files in a mix of block types (`q4_k_m`, ...): weights are quantized anew, each input weighed by the importance matrix, which is written beside the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from qforge.errors import NumericalError
from qforge.export import imatrix as matrices
from qforge.export.gguf import GgufExporter, Tensor, dequantized, plain, write_file
from qforge.export.gguf_types import MIXES, tensor_type
from qforge.export.imatrix import Imatrix
from qforge.export.refusal import refuse
from qforge.layouts.gguf_superblocks import pack
from qforge.methods import superblock
from qforge.models.model import Model
from qforge.models.names import HEAD, gguf_names, is_router, stack_of
from qforge.models.tying import shared_table

_EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class GgufMixExporter:
    """The exporter (see docs/architecture.md).

    Attributes:
        type: name of a mix.
        imatrix: importance of inputs; None weighs all alike.
    """

    type: str
    imatrix: Imatrix | None = None
    name: str = "gguf"
    holds_kv_scales: ClassVar[bool] = False

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        return GgufExporter("f32").check(model)

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write `model-<mix>.gguf` into `folder`, and `imatrix.gguf` beside it; one tensor in memory at a time.

        Raises:
            UnsupportedError: `check` says why not.
            NumericalError: a weight is not finite, or needs a scale that fp16 does not hold.
            OutputError: the folder cannot be written.
        """
        refuse("GGUF", self.check(model))
        mix = MIXES[self.type]
        path = folder / f"model-{mix.name}.gguf"
        write_file(path, model, list(self.tensors(model)), int(mix.file_type), lambda writer: self._add_imatrix(writer, model))
        if self.imatrix is None:
            return [path]
        matrices.write(self.imatrix, self._weighed(model), folder / matrices.FILE)
        return [path, folder / matrices.FILE]

    def _add_imatrix(self, writer: GGUFWriter, model: Model) -> None:
        """What llama-quantize says of the importance matrix that it was given."""
        if self.imatrix is not None:
            writer.add_string("quantize.imatrix.file", matrices.FILE)
            writer.add_string("quantize.imatrix.dataset", self.imatrix.dataset)
            writer.add_uint32("quantize.imatrix.entries_count", len(matrices.stacks(self.imatrix, self._weighed(model))))
            writer.add_uint32("quantize.imatrix.chunks_count", self.imatrix.sequences)

    def _weighed(self, model: Model) -> dict[str, str]:
        """GGUF's name of the tensor that each module of the importance matrix multiplies with, and those of all experts."""
        assert self.imatrix is not None
        names = gguf_names(model.config)
        experts = (name.removesuffix(".weight") for name, theirs in names.items() if theirs != stack_of(theirs))
        head = names[f"{_EMBEDDING if _tied(model) else HEAD}.weight"]
        return {module: head if module == HEAD else names[f"{module}.weight"] for module in dict.fromkeys((*experts, *self.imatrix.sums))}

    def tensors(self, model: Model) -> Iterator[Tensor]:
        """All tensors of the file."""
        assert model.spec is not None
        ours = {theirs: name for name, theirs in gguf_names(model.config).items()}
        tied = _tied(model)
        for t in GgufExporter("f32").tensors(model):
            if len(t.shape) != 2 or is_router(model.config.model_type, ours[t.name]):
                yield t
                continue
            kind = tensor_type(MIXES[self.type], stack_of(t.name), t.shape[1], model.spec, tied)
            yield self._matrix(model, ours[t.name].removesuffix(".weight"), t, kind, tied)

    def _matrix(self, model: Model, module: str, tensor: Tensor, kind: str, tied: bool) -> Tensor:
        used_by = HEAD if tied and module == _EMBEDDING else module
        importance = None if self.imatrix is None else self.imatrix.of(used_by)

        def read() -> np.ndarray:
            weight = dequantized(model, used_by) if used_by in model.schemes else plain(model, f"{module}.weight")
            if kind == "F16":
                return weight.to(torch.float16).numpy()
            try:
                return pack(superblock.quantize(weight, importance, kind)).numpy()
            except NumericalError as e:
                raise NumericalError(f"{module}: {e}") from e

        return Tensor(tensor.name, GGMLQuantizationType[kind], tensor.shape, read)


def _tied(model: Model) -> bool:
    """Whether the file has no output head of its own."""
    return bool(model.config.tie_word_embeddings) and (HEAD not in model.schemes or shared_table(model, model.schemes) is not None)
