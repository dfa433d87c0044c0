"""A decoder's weights, read and packed: what the native step and the reference both compute with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from qforge.ops.layers import AttentionParameters
from qforge.ops.packing import Tiles, embed
from qforge.runtime.linears import Linear
from qforge.types import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Gate and up, and what reads the one's activation times the other; or one expert."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's weights. Norm weights are fp32 and hold the family's offset already; None where the family has none.

    Attributes:
        router: `[experts]` logits, or None: the layer has one MLP.
        mlps: that one, or the experts.
    """

    input_norm: torch.Tensor | None
    qkv: Linear
    attention: AttentionParameters
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    router: Linear | None
    mlps: tuple[Mlp, ...]
    post_mlp_norm: torch.Tensor | None
    rope: RopeSpec


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Token embedding and output head; tied ones share one copy in memory, the head's tiles.

    Attributes:
        table: `[V, W]` in the dtype in which the model stores it, or those tiles.
        logits: the output head.
    """

    table: torch.Tensor | Tiles
    logits: Linear

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table `[T, W]`, fp32."""
        return embed(self.table, tokens) if isinstance(self.table, Tiles) else self.table[tokens].float()


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model."""

    spec: ModelSpec
    layers: list[Layer]
    norm: torch.Tensor
    head: Head

    def kernels(self) -> dict[str, int]:
        """How many products each kernel runs."""
        return dict(Counter(p.kernel for p, _ in self._products()))

    def nbytes(self) -> int:
        """Bytes of weights as their kernels read them in a step with one token, which some experts have nothing to do with."""
        return round(sum(share * part.nbytes for product, share in self._products() for part in product.parts))

    def _products(self) -> list[tuple[Linear, float]]:
        """All of them, and what share of the tokens each computes."""
        found = [(self.head.logits, 1.0)]
        for layer in self.layers:
            share = 1.0 if layer.router is None or self.spec.experts is None else self.spec.experts.active / self.spec.experts.count
            found += [(p, 1.0) for p in (layer.qkv, layer.output, layer.router) if p is not None]
            found += [(p, share) for mlp in layer.mlps for p in (mlp.gate_up, mlp.down)]
        return found
