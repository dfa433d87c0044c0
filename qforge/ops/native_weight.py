"""A packed weight as plain memory: what the native module's `Weight` points into, be it tensors that were just packed or a mapped file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qforge.ops.native_module import missing, module

Buffer = npt.NDArray[np.uint8]  # one-dimensional, contiguous: the bytes of a tensor


def address(buffer: Buffer | None) -> int:
    """Where it lies; 0 for none."""
    return 0 if buffer is None else int(buffer.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeight:
    """The fields are those of `packing.Tiles`, tensors as bytes.

    Attributes:
        scales: in fp32; None where they are `half_scales`, in fp16.
        activations: `F32`, or `INT8` or `INT16`: what the kernel rounds its inputs to, by segments; or `BF16`: inputs and weights.
        bias: `[out_features]` fp32, or None.
    """

    format: str
    out_features: int
    in_features: int
    blocks: int
    block_k: int
    run: int
    activations: str
    codes: Buffer
    scales: Buffer | None = None
    half_scales: Buffer | None = None
    zeros: Buffer | None = None
    code_sums: Buffer | None = None
    pair_sums: Buffer | None = None
    book: Buffer | None = None
    bias: Buffer | None = None
    gather: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a product with one row reads: no sums of codes, which it makes, and, but for activations in fp32, no zero points that are all the same."""
        zeros = self.zeros if self.activations == "F32" or self.view().zero < 0 else None
        return sum(b.nbytes for b in (self.codes, self.scales, self.half_scales, zeros) if b is not None)

    def view(self) -> Any:
        """The native view; valid as long as the buffers live."""
        native = module()
        assert native is not None, missing()
        addresses = [address(b) for b in (self.codes, self.scales, self.half_scales, self.zeros, self.code_sums, self.pair_sums, self.book, self.bias)]
        return native.Weight(getattr(native.Format, self.format), self.out_features, self.blocks, self.block_k, self.run, *addresses, getattr(native.Activations, self.activations))
