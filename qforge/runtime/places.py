"""Where weights are kept, and which kernels read them there: this machine's processor, or a GPU."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from qforge import numerics
from qforge.errors import UnsupportedError
from qforge.models.model import Model
from qforge.ops.dense import DenseKernel
from qforge.ops.reference import ReferenceKernel
from qforge.ops.select import Choice, choose
from qforge.runtime.linears import Dense, Linear, Part, Weight, linear
from qforge.runtime.weights import Head


class Place(Protocol):
    """Takes weights as they were read and keeps what its kernels read."""

    def linear(self, weight: Weight, wide: bool = False) -> Linear:
        """A packed product; `wide`: its outputs are fp32 whatever its inputs are."""

    def tied(self, weight: Weight) -> Head:
        """An embedding and an output head that are one weight `[V, W]`."""

    def table(self, table: torch.Tensor) -> torch.Tensor:
        """An embedding `[V, W]`, to look tokens up in."""

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """A norm's weight `[W]` fp32."""


@dataclass(frozen=True, slots=True)
class Host:
    """The processor: native kernels, and torch where there are none.

    Attributes:
        threads: of the kernels; None: every core.
        activations: one of `ACTIVATIONS` (qforge/scheme.py).
    """

    threads: int | None = None
    activations: str = "fp"

    def linear(self, weight: Weight, wide: bool = False) -> Linear:
        """See `Place.linear`; all outputs are fp32."""
        return linear(weight, self.threads, self.activations)

    def tied(self, weight: Weight) -> Head:
        """See `Place.tied`: the head's tiles, from which tokens are read, too."""
        logits = self.linear(weight)
        packed = logits.parts[0].packed
        if packed is not None:
            return Head(packed.tiles, logits)
        return Head(weight.weight if isinstance(weight, Dense) else numerics.dequantize(weight), logits)

    def table(self, table: torch.Tensor) -> torch.Tensor:
        """See `Place.table`: in the dtype in which the model stores it."""
        return table.contiguous()

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Place.norm`."""
        return weight.contiguous()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: Triton's kernels for what they support; other weights are kept dequantized in the type of activations.

    Attributes:
        device: where tensors are; `cpu` where Triton interprets its kernels.
        dtype: fp16 or bf16, of activations.
    """

    device: torch.device
    dtype: torch.dtype

    def linear(self, weight: Weight, wide: bool = False) -> Linear:
        """See `Place.linear`."""
        dense = DenseKernel(self.dtype, wide)
        if isinstance(weight, Dense):
            packed: Any = dense.keep(weight.weight.to(self.device), None if weight.bias is None else weight.bias.to(self.device))
            return _product(Choice(dense), packed, *weight.weight.shape)
        shape = (weight.out_features, weight.in_features)
        choice = choose(weight.scheme, shape, str(self.device) if self.device.type == "cuda" else "cuda")
        if isinstance(choice.kernel, ReferenceKernel):
            choice = Choice(dense, choice.passed_over)
        packed = choice.kernel.prepack(weight.to(self.device))
        return _product(choice, packed, *shape)

    def tied(self, weight: Weight) -> Head:
        """See `Place.tied`: one table, dequantized."""
        table = self.table(weight.weight if isinstance(weight, Dense) else numerics.dequantize(weight))
        return Head(table, self.linear(Dense(table), wide=True))

    def table(self, table: torch.Tensor) -> torch.Tensor:
        """See `Place.table`: in the type of activations."""
        return table.to(self.device, self.dtype).contiguous()

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Place.norm`."""
        return weight.to(self.device).contiguous()


def gpu(model: Model, device: str) -> Gpu:
    """Where a model goes on a device: in bf16 if it is stored so or adds norms behind its layers (Gemma's activations exceed fp16's range), else in fp16.

    Raises:
        UnsupportedError: it has experts.
    """
    if model.spec is not None and model.spec.experts is not None:
        raise UnsupportedError(f"'{model.source}' is a mixture of experts, which the runtime computes on the processor only; use device: cpu")
    wide = model.dtype is torch.bfloat16 or (model.spec is not None and model.spec.post_norms)
    return Gpu(torch.device(device if ":" in device else f"{device}:0"), torch.bfloat16 if wide else torch.float16)


def _product(choice: Choice, packed: Any, out_features: int, in_features: int) -> Linear:
    held = sum(v.nbytes for f in fields(packed) if isinstance(v := getattr(packed, f.name), torch.Tensor))
    return Linear(choice.explain(), (Part(lambda x: choice.kernel.run(x, packed), out_features, in_features, held=held),))
