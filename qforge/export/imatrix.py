"""The importance matrix, and its file as llama.cpp's own tools write and read it (`llama-imatrix`, `llama-quantize --imatrix`).

    general.type "imatrix"; imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size
    <tensor>.in_sum2  fp32 [E, I]     sums of squared inputs of the product with <tensor>; E: 1, or experts
    <tensor>.counts   fp32 [E, 1]     over so many tokens

Source: llama.cpp's `tools/imatrix/imatrix.cpp` and `common/imatrix-loader.cpp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter

from qforge.files import atomic
from qforge.models.locate import IMATRIX
from qforge.models.names import stack_of

FILE = IMATRIX


@dataclass(frozen=True, slots=True)
class Imatrix:
    """What calibration found.

    Attributes:
        sums: of squared inputs, fp32 `[I]`, by module name (`calibration.importance.square_sums`).
        tokens: over so many; an expert's are those that it was sent.
        sequences: of the calibration text.
        sequence_length: tokens in each.
        dataset: the text's name.
    """

    sums: Mapping[str, torch.Tensor]
    tokens: Mapping[str, int]
    sequences: int
    sequence_length: int
    dataset: str

    def of(self, module: str) -> torch.Tensor | None:
        """Mean squares of the inputs of a linear `[I]`; None where it has none."""
        total = self.sums.get(module)
        return None if total is None else total / self.tokens[module]


def stacks(imatrix: Imatrix, names: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules of each tensor that the file tells of, by GGUF's name: one, or all experts of which any has a sum."""
    found: dict[str, list[str]] = {}
    for module, tensor in names.items():
        found.setdefault(stack_of(tensor), []).append(module)
    return {tensor: modules for tensor, modules in found.items() if any(m in imatrix.sums for m in modules)}


def write(imatrix: Imatrix, names: Mapping[str, str], path: Path) -> None:
    """Write the file.

    Args:
        imatrix: the sums.
        names: module name -> GGUF's tensor name (`models.names.gguf_names`), of the matrices that the file is about; of those that the sums lack, experts have sums of 0.
        path: of the file.

    Raises:
        OutputError: it cannot be written.
    """
    with atomic(path) as temporary, contextlib.closing(GGUFWriter(temporary, "imatrix")) as writer:
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [imatrix.dataset])
        writer.add_uint32("imatrix.chunk_count", imatrix.sequences)
        writer.add_uint32("imatrix.chunk_size", imatrix.sequence_length)
        for tensor, modules in stacks(imatrix, names).items():
            width = next(len(imatrix.sums[m]) for m in modules if m in imatrix.sums)
            writer.add_tensor(f"{tensor}.in_sum2", torch.stack([imatrix.sums.get(m, torch.zeros(width)) for m in modules]).numpy())
            writer.add_tensor(f"{tensor}.counts", np.array([[imatrix.tokens.get(m, 0)] for m in modules], dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
