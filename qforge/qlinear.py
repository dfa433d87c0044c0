"""A quantized linear layer: a scheme and the logical, unpacked tensors that it describes. Methods produce it, layouts transcribe it, kernels prepack it.

Letters: O output features, I input features, R x C shape of the scales (`Scheme.scale_shape`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from qforge.scheme import Scheme, Symmetry


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """One quantized weight `[O, I]` (or a stack `[E, O, I]`: every tensor then has the leading E).

    Attributes:
        scheme: what the tensors mean.
        codes: `[O, I]`. int8 for symmetric integers, uint8 for integers with a zero point or an offset, for raw float bit patterns and
            for code-book indices.
        scales: `[R, C]` fp32, holding only values that are exact in the scheme's scale type. For two-level schemes: the *effective*
            scale, already multiplied by its super scale.
        zeros: `[R, C]` uint8 integer zero points (asym), or fp32 minima that are added (offset); None when symmetric.
        group_index: `[I]` int32, the scale column of each input; None when groups are contiguous.
        super_scales: second-level scales, fp32; None for one-level schemes.
        input_scale: fp32 scalar tensor, static activation scale; None when dynamic or unquantized.
        bias: `[O]` in the model's dtype, or None.
    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_index: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes.dtype == code_dtype(self.scheme), (self.codes.dtype, str(self.scheme))
        assert self.scales.dtype == torch.float32
        assert tuple(self.scales.shape[-2:]) == self.scheme.scale_shape(self.out_features, self.in_features), (self.scales.shape, self.codes.shape, str(self.scheme))
        assert (self.zeros is None) == (self.scheme.symmetry is Symmetry.SYM)

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return int(self.codes.shape[-2])

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return int(self.codes.shape[-1])

    def to(self, device: torch.device | str) -> QuantizedLinear:
        """The same on a device; itself where it is there already."""
        moved: dict[str, Any] = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), torch.Tensor)}
        return self if moved["codes"] is self.codes else replace(self, **moved)

    def equals(self, other: QuantizedLinear) -> bool:
        """Whether scheme and every tensor are equal bit for bit."""
        names = ("codes", "scales", "zeros", "group_index", "super_scales", "input_scale", "bias")
        if self.scheme != other.scheme:
            return False
        for a, b in ((getattr(self, n), getattr(other, n)) for n in names):
            if (a is None) != (b is None) or (a is not None and (a.dtype != b.dtype or not torch.equal(a, b))):
                return False
        return True


def code_dtype(scheme: Scheme) -> torch.dtype:
    """The dtype of `codes` for a scheme."""
    return torch.int8 if scheme.number.is_int and scheme.symmetric else torch.uint8
