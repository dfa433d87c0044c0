"""The importance matrix, and its file as llama.cpp's own tools write and read it (`llama-imatrix`, `llama-quantize --imatrix`).

    general.type "imatrix"; imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size
    <tensor>.in_sum2  fp32 [1, I]     sums of squared inputs of the product with <tensor>
    <tensor>.counts   fp32 [1, 1]     over so many tokens

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

FILE = IMATRIX


@dataclass(frozen=True, slots=True)
class Imatrix:
    """What calibration found.

    Attributes:
        sums: of squared inputs, fp32 `[I]`, by module name (`calibration.importance.square_sums`).
        sequences: of the calibration text.
        sequence_length: tokens in each.
        dataset: the text's name.
    """

    sums: Mapping[str, torch.Tensor]
    sequences: int
    sequence_length: int
    dataset: str

    def of(self, module: str) -> torch.Tensor | None:
        """Mean squares of the inputs of a linear `[I]`; None where it has none."""
        total = self.sums.get(module)
        return None if total is None else total / (self.sequences * self.sequence_length)


def write(imatrix: Imatrix, names: Mapping[str, str], path: Path) -> None:
    """Write the file.

    Args:
        imatrix: the sums.
        names: module name -> GGUF's tensor name, of the matrices that the file is about.
        path: of the file.

    Raises:
        OutputError: it cannot be written.
    """
    with atomic(path) as temporary, contextlib.closing(GGUFWriter(temporary, "imatrix")) as writer:
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [imatrix.dataset])
        writer.add_uint32("imatrix.chunk_count", imatrix.sequences)
        writer.add_uint32("imatrix.chunk_size", imatrix.sequence_length)
        count = np.full((1, 1), imatrix.sequences * imatrix.sequence_length, dtype=np.float32)
        for module, tensor in names.items():
            writer.add_tensor(f"{tensor}.in_sum2", imatrix.sums[module][None].numpy())
            writer.add_tensor(f"{tensor}.counts", count)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
