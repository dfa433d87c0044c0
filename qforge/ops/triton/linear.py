"""The GPU's kernels for quantized linears, as `Kernel`."""

from __future__ import annotations

import torch

from qforge.ops.triton import custom_ops
from qforge.ops.triton.present import capability, interpreted, missing
from qforge.ops.triton.products import w4_linear, w8_linear
from qforge.ops.triton.w4_pack import W4, longest_step, pack_w4, unpackable
from qforge.ops.triton.w8_pack import W8, pack_w8
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Number, Per, Scheme, Symmetry

_SHORTEST_STEP = 32  # inputs of one 8-bit tensor-core product
_FLOAT8 = 89  # the first compute capability with e4m3 products


class TritonW4:
    """4-bit integers times fp16 or bf16 activations."""

    name, code = "triton-w4a16", None

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """See `Kernel.supports`."""
        if not scheme.number.is_int or scheme.bits > 4 or scheme.symmetry is Symmetry.OFFSET:
            return f"{scheme} is not a 4-bit integer with an integer zero point or none"
        if scheme.activations is not None:
            return "activations are to be rounded"
        if scheme.granularity.per is Per.BLOCK:
            return "scales of blocks are not packed for it"
        return (unpackable(scheme.granularity.columns) if scheme.granularity.per is Per.GROUP else None) or missing(device)

    def prepack(self, q: QuantizedLinear) -> W4:
        """See `Kernel.prepack`."""
        return pack_w4(q)

    def run(self, x: torch.Tensor, packed: W4) -> torch.Tensor:
        """`x [T, I] -> [T, O]` in x's dtype; fp32 is multiplied as bf16."""
        product = custom_ops.w4_linear if torch.compiler.is_compiling() else w4_linear
        return product(x.bfloat16() if x.dtype == torch.float32 else x, packed).to(x.dtype)


class TritonW8:
    """8-bit integers or e4m3 floats times activations rounded to the same type, one scale a token or a group of inputs."""

    name, code = "triton-w8a8", None

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """See `Kernel.supports`."""
        a = scheme.activations
        wanted = Number.INT8 if scheme.number.is_int else Number.FP8_E4M3
        if not (scheme.number.is_int and scheme.symmetric) and scheme.number is not Number.FP8_E4M3:
            return f"{scheme} is neither symmetric integers nor e4m3"
        if a is None or a.static or a.number is not wanted or a.granularity.per not in (Per.TOKEN, Per.GROUP):
            return f"activations are not rounded to {wanted} with a scale for each token or group while it runs"
        lengths = [g.columns for g in (scheme.granularity, a.granularity) if g.columns]
        if any(longest_step(n) < _SHORTEST_STEP for n in lengths):
            return f"groups of {min(lengths)} inputs are not a multiple of {_SHORTEST_STEP}"
        if a.granularity.columns and (a.granularity.columns != longest_step(a.granularity.columns) or a.granularity.columns > 128):
            return f"groups of {a.granularity.columns} activations are not a power of two up to 128"
        return missing(device) or self._lacking(wanted, device)

    def _lacking(self, number: Number, device: str) -> str | None:
        if number is Number.INT8 or interpreted() or capability(torch.device(device)) >= _FLOAT8:
            return None
        return "this GPU has no products of 8-bit floats"

    def prepack(self, q: QuantizedLinear) -> W8:
        """See `Kernel.prepack`."""
        return pack_w8(q)

    def run(self, x: torch.Tensor, packed: W8) -> torch.Tensor:
        """`x [T, I] -> [T, O]` in x's dtype."""
        return custom_ops.w8_linear(x, packed) if torch.compiler.is_compiling() else w8_linear(x, packed)
