"""Reads a process's share of a model: the decoders compute with it as with a whole one, and its products exchange what they must.

Letters: T tokens, O outputs, V vocabulary, N processes.
"""

from __future__ import annotations

import torch
from torch import distributed

from qforge import numerics
from qforge.errors import UnsupportedError
from qforge.models.model import Model
from qforge.models.names import HEAD, JOINT
from qforge.runtime.decoder import supports
from qforge.runtime.linears import Dense, Linear, Part, Product, Weight
from qforge.runtime.loader import Reader, with_kv_scales, with_plain_sums
from qforge.runtime.places import Place
from qforge.runtime.shares import Share, of_inputs, of_outputs, of_parts, of_spec
from qforge.runtime.weights import Head, Weights
from qforge.types import ModelSpec

_BY_INPUTS = ("o_proj", "down_proj")


def read_share(model: Model, place: Place, share: Share) -> Weights:
    """A process's share of all weights. Its products need the default process group of torch.distributed, from their first call on.

    Raises:
        UnsupportedError: a family that the runtime does not list, or weights that so many processes cannot share.
        ModelError: a tensor is missing or damaged.
    """
    reason = supports(model.spec)
    if reason is not None or model.spec is None:
        raise UnsupportedError(f"'{model.source}' cannot run on the built-in runtime: {reason}")
    spec = of_spec(with_kv_scales(model, with_plain_sums(model.spec)), share)
    reader = _SharedReader(model, spec, place, share)
    return Weights(spec, [reader.layer(i) for i in range(spec.num_layers)], reader.last_norm(), reader.head())


class _SharedReader(Reader):
    """Reads parts by module name."""

    def __init__(self, model: Model, spec: ModelSpec, place: Place, share: Share) -> None:
        super().__init__(model, spec, place)
        self._share = share
        keys = share.size * spec.num_kv_heads * spec.head_dim
        self._sizes = {"qkv_proj": (share.size * spec.num_heads * spec.head_dim, keys, keys), "gate_up_proj": (share.size * spec.intermediate_size,) * 2}

    def head(self) -> Head:
        """The whole embedding, and the head's share of the vocabulary where N divides it."""
        embedding, head = self._ends()
        table = self._place.table(embedding.weight if isinstance(embedding, Dense) else numerics.dequantize(embedding))
        if head is None:
            head = Dense(table) if isinstance(embedding, Dense) else embedding
        if self._spec.vocab_size % self._share.size:
            return Head(table, self._place.linear(head, wide=True))
        return Head(table, _gathered(self._place.linear(of_outputs(head, self._share, HEAD), wide=True), self._share.size))

    def _linear(self, name: str) -> Linear:
        return _summed(super()._linear(name))

    def _weight(self, name: str) -> Weight:
        kind, whole = name.rpartition(".")[2], self._whole(name)
        if kind in JOINT:
            return of_parts(whole, self._share, self._sizes[kind])
        return (of_inputs if kind in _BY_INPUTS else of_outputs)(whole, self._share, name)


def _summed(linear: Linear) -> Linear:
    """`[T, O]`: the sum of all processes' products."""

    def product(x: torch.Tensor) -> torch.Tensor:
        y = linear(x).contiguous()
        distributed.all_reduce(y)
        return y

    return _exchanged(linear, product, 1)


def _gathered(linear: Linear, size: int) -> Linear:
    """`[T, V]`: all processes' products side by side."""

    def product(x: torch.Tensor) -> torch.Tensor:
        y = linear(x).contiguous()
        parts = [torch.empty_like(y) for _ in range(size)]
        distributed.all_gather(parts, y)
        return torch.cat(parts, 1)

    return _exchanged(linear, product, size)


def _exchanged(linear: Linear, product: Product, times: int) -> Linear:
    outputs, inputs = sum(p.out_features for p in linear.parts), linear.parts[0].in_features
    return Linear(linear.kernel, (Part(product, times * outputs, inputs, held=sum(p.nbytes for p in linear.parts)),))
