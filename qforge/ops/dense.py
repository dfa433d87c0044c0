"""Products with 16-bit weights on a GPU: what no quantized kernel runs there is dequantized once, when it is loaded.

Letters: T tokens, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qforge import numerics
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """`weight [O, I]` and `bias [O]` in 16 bits; `rounding`: what the scheme does to activations, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rounding: Callable[[torch.Tensor], torch.Tensor] | None = None


class DenseKernel:
    """Weights and activations in fp16 or bf16, sums in fp32 (cuBLAS).

    Args:
        dtype: of weights and activations.
        wide: give sums as they are, in fp32.
    """

    code = None

    def __init__(self, dtype: torch.dtype, wide: bool = False) -> None:
        self.name, self._dtype, self._wide = f"dense-{str(dtype).removeprefix('torch.')}", dtype, wide

    def supports(self, scheme: Scheme, shape: tuple[int, int], device: str) -> str | None:
        """Everything is supported (see `Kernel.supports`)."""
        return None

    def prepack(self, q: QuantizedLinear) -> DenseWeight:
        """See `Kernel.prepack`."""
        return self.keep(numerics.dequantize(q), q.bias, numerics.input_rounding(q.scheme, q.input_scale))

    def keep(self, weight: torch.Tensor, bias: torch.Tensor | None, rounding: Callable[[torch.Tensor], torch.Tensor] | None = None) -> DenseWeight:
        """An unquantized weight; not copied where it has the type already."""
        return DenseWeight(weight.to(self._dtype), None if bias is None else bias.to(self._dtype), rounding)

    def run(self, x: torch.Tensor, packed: DenseWeight) -> torch.Tensor:
        """`x [T, I] -> [T, O]` in the kernel's type, or fp32."""
        x = (x if packed.rounding is None else packed.rounding(x)).to(self._dtype)
        if not self._wide:
            return torch.nn.functional.linear(x, packed.weight, packed.bias)
        # on a processor torch has no product whose sums stay in fp32
        y = torch.mm(x, packed.weight.T, out_dtype=torch.float32) if x.is_cuda else x.float() @ packed.weight.float().T
        return y if packed.bias is None else y + packed.bias
