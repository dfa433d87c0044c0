"""A model as the native step takes it: sizes, kernels, and memory that somebody holds. Needs no torch; `lowering` makes it of packed tensors, `packed_file` of a mapped file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from qforge.ops.native_weight import Buffer, NativeWeight
from qforge.types import ModelSpec

Elsewhere = Callable[[int, int, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class NativePart:
    """One weight of a product.

    Attributes:
        weight: what a native kernel reads, or None.
        arithmetic: `FP32`, or `INT8`: activations rounded by row, or all with `static_scale` where that is not 0.
        elsewhere: where no native kernel runs the product: takes addresses of fp32 inputs `[rows, in_features]`, rows, address and row stride of the outputs.
        held: bytes of what it reads there, where that is known.
    """

    out_features: int
    in_features: int
    weight: NativeWeight | None = None
    arithmetic: str = "FP32"
    static_scale: float = 0.0
    elsewhere: Elsewhere | None = None
    held: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as its kernel reads it; those of fp32 where no native kernel does."""
        if self.held is not None:
            return self.held
        return 4 * self.out_features * self.in_features if self.weight is None else self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class NativeProduct:
    """Outputs of its parts side by side. `kernel`: its name, and why not a faster one."""

    kernel: str
    parts: tuple[NativePart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NativeMlp:
    """Gate and up, and what reads the one's activation times the other; or one expert."""

    gate_up: NativeProduct
    down: NativeProduct


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """One layer.

    Attributes:
        norms: fp32 weights of input, post-attention, MLP, post-MLP, query and key norm, None where the family has none.
        router: its outputs are the experts' logits; None: the layer has one MLP.
        mlps: that one, or the experts.
    """

    norms: tuple[Buffer | None, ...]
    qkv: NativeProduct
    output: NativeProduct
    router: NativeProduct | None
    mlps: tuple[NativeMlp, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NativeEmbedding:
    """Token embeddings. `table`: values of a float `format`, row by row; None: they are the output head's weights, in its tiles."""

    format: str
    table: Buffer | None


@dataclass(frozen=True, slots=True, eq=False)
class NativeModel:
    """A whole model. `frequencies`: for each kind of rotary embedding, in the order in which the layers first have it, fp32 radians per position `[head_dim / 2]`."""

    spec: ModelSpec
    frequencies: tuple[Buffer, ...]
    layers: tuple[NativeLayer, ...]
    norm: Buffer
    embedding: NativeEmbedding
    head: NativeProduct

    def products(self) -> list[NativeProduct]:
        """Every product, the output head last."""
        return [product for product, _ in self._shares()]

    def kernels(self) -> dict[str, int]:
        """How many products each kernel runs."""
        return dict(Counter(p.kernel for p in self.products()))

    def nbytes(self) -> int:
        """Bytes of weights as their kernels read them in a step with one token, which some experts have nothing to do with."""
        return round(sum(share * part.nbytes for product, share in self._shares() for part in product.parts))

    def _shares(self) -> list[tuple[NativeProduct, float]]:
        """All products, and what share of the tokens each computes."""
        found = []
        for layer in self.layers:
            share = 1.0 if layer.router is None or self.spec.experts is None else self.spec.experts.active / self.spec.experts.count
            found += [(p, 1.0) for p in (layer.qkv, layer.output, layer.router) if p is not None]
            found += [(p, share) for mlp in layer.mlps for p in (mlp.gate_up, mlp.down)]
        return [*found, (self.head, 1.0)]
