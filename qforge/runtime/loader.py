"""An opened model -> the decoder's weights: reads each weight once, in its stored form, and packs it for its kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from qforge.errors import ModelError, NotOnRuntimeError
from qforge.models import names
from qforge.models.model import Model
from qforge.models.tying import shared_table
from qforge.ops.layers import AttentionParameters
from qforge.runtime.decoder import supports
from qforge.runtime.linears import Dense, Linear, Weight, joined, rows
from qforge.runtime.places import Host, Place
from qforge.runtime.rope import row_order
from qforge.runtime.weights import Head, Layer, Mlp, Weights
from qforge.types import ModelSpec


def read(model: Model, place: Place | None = None) -> Weights:
    """All weights, packed for a place (this machine's processor unless given), as `Decoder` and `GpuDecoder` take them.

    Raises:
        NotOnRuntimeError: a family that the runtime does not list; the message says what runs it.
        ModelError: a tensor is missing or damaged.
    """
    reason = supports(model.spec)
    if reason is not None or model.spec is None:
        raise NotOnRuntimeError(f"'{model.source}' cannot run on the built-in runtime: {reason}; generate and eval take transformers for it")
    spec = with_kv_scales(model, with_plain_sums(model.spec))
    reader = Reader(model, spec, place or Host())
    layers = [reader.layer(i) for i in range(spec.num_layers)]
    return Weights(spec, layers, reader.last_norm(), reader.head())


def with_plain_sums(spec: ModelSpec) -> ModelSpec:
    """The same model with residual_scale 1, so that no decoder needs to know of one: its residual stream is 1 / residual_scale times as large, from the embedding on.

    Norms take that out again (x / c / sqrt(mean(x^2) / c^2 + epsilon / c^2)), and nothing else reads the stream. Norms of queries, keys and branches would need an
    epsilon of their own.
    """
    scale = spec.residual_scale
    if scale == 1.0:
        return spec
    assert not spec.qk_norm
    assert not spec.post_norms
    return replace(spec, residual_scale=1.0, embedding_scale=spec.embedding_scale / scale, norm_eps=spec.norm_eps / scale**2)


def with_kv_scales(model: Model, spec: ModelSpec) -> ModelSpec:
    """The same with the scales of keys and values that the checkpoint has.

    Raises:
        ModelError: they are not those of the model's layers.
    """
    if not model.kv_scales:
        return spec
    modules = [f"model.layers.{i}.self_attn" for i in range(spec.num_layers)]
    if set(modules) != set(model.kv_scales):
        raise ModelError(f"'{model.source}' has no scales of keys and values for {sorted(set(modules) - set(model.kv_scales))[0]}")
    found = (model.kv_scales[module] for module in modules)  # of keys as transformers caches them, which YaRN has multiplied
    return replace(spec, kv_scales=tuple((key / rope.amplitude, value) for (key, value), rope in zip(found, spec.layer_ropes, strict=True)))


class Reader:
    """Reads weights by module name."""

    def __init__(self, model: Model, spec: ModelSpec, place: Place) -> None:
        self._model, self._spec, self._place = model, spec, place
        self._names = set(model.weights.names())

    def layer(self, index: int) -> Layer:
        """All of one layer."""
        spec, at = self._spec, f"model.layers.{index}."
        q_norm, k_norm = (self.norm(f"{at}self_attn.{n}_norm") for n in "qk") if spec.qk_norm else (None, None)
        attention = AttentionParameters(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.layer_windows[index], spec.score_scale(index), q_norm, k_norm, spec.norm_eps, spec.whole_qk_norm,
        )  # fmt: skip
        mixed = spec.experts is not None and spec.experts.layers[index]
        input_norm, post_attention_norm, mlp_norm, post_mlp_norm = (None if norm is None else self.norm(at + norm) for norm in spec.norms)
        return Layer(
            input_norm=input_norm,
            qkv=self._qkv(index, at),
            attention=attention,
            output=self._linear(at + "self_attn.o_proj"),
            post_attention_norm=post_attention_norm,
            mlp_norm=mlp_norm,
            router=self._place.linear(self._whole(at + names.router(spec.family)), wide=True) if mixed else None,
            mlps=tuple(
                Mlp(joined([self._weight(at + n) for n in inputs], self._place.linear), self._linear(at + down))
                for inputs, down in names.mlps(spec.family, spec.experts.count if spec.experts is not None and mixed else None)
            ),
            post_mlp_norm=post_mlp_norm,
            rope=spec.layer_ropes[index],
        )

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight, fp32, with the family's offset."""
        return self._place.norm(self._model.weights.read(f"{name}.weight").float() + self._spec.norm_offset)

    def last_norm(self) -> torch.Tensor:
        """The weight of the norm before the output head, times what logits are multiplied by."""
        return self.norm("model.norm") * self._spec.logits_scale

    def head(self) -> Head:
        """Embedding and output head; one copy where the model ties them, be it of codes."""
        embedding, head = self._ends()
        if head is None:
            return self._place.tied(embedding)
        assert isinstance(embedding, Dense)
        return Head(self._place.table(embedding.weight), self._place.linear(head, wide=True))

    def _ends(self) -> tuple[Weight, Weight | None]:
        """Embedding and output head, None for one that is the embedding."""
        if shared_table(self._model, self._model.schemes) is not None:
            return self._scaled_like_norm(self._model.linear(names.HEAD)), None
        table = Dense(self._model.weights.read("model.embed_tokens.weight"))
        untied = names.HEAD in self._model.schemes or (not self._spec.tied_head and f"{names.HEAD}.weight" in self._names)
        return table, self._scaled_like_norm(self._whole(names.HEAD)) if untied else None

    def _scaled_like_norm(self, head: Weight) -> Weight:
        """A head whose inputs are rounded with a stored scale: these are `last_norm`'s, and so is the scale."""
        if isinstance(head, Dense) or head.input_scale is None or self._spec.logits_scale == 1.0:
            return head
        return replace(head, input_scale=head.input_scale * self._spec.logits_scale)

    def _linear(self, name: str) -> Linear:
        return self._place.linear(self._weight(name))

    def _qkv(self, index: int, at: str) -> Linear:
        """Of one layer; where the family does not rotate as the decoders do, with its rows in their order."""
        spec, weights = self._spec, [self._weight(at + n) for n in names.attention_inputs(self._spec.family)]
        queries, keys = (row_order(spec.layer_ropes[index], heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads))
        if queries is not None and keys is not None:
            assert not spec.qk_norm
            order = [queries, keys, torch.arange(len(keys))]
            if len(weights) == 1:
                starts = (0, len(queries), len(queries) + len(keys))
                order = [torch.cat([start + part for start, part in zip(starts, order, strict=True)])]
            weights = [rows(weight, part) for weight, part in zip(weights, order, strict=True)]
        return joined(weights, self._place.linear)

    def _weight(self, name: str) -> Weight:
        return self._whole(name)

    def _whole(self, name: str) -> Weight:
        if name in self._model.schemes:
            return self._model.linear(name)
        bias = self._model.weights.read(f"{name}.bias") if f"{name}.bias" in self._names else None
        return Dense(self._model.weights.read(f"{name}.weight"), bias)
