"""An opened model -> the decoder's weights: reads each weight once, in its stored form, and packs it for its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qforge.errors import UnsupportedError
from qforge.models.model import Model
from qforge.ops.layers import AttentionParameters
from qforge.ops.native_module import missing
from qforge.qlinear import QuantizedLinear
from qforge.runtime.decoder import supports
from qforge.runtime.linears import Dense, Linear, joined, linear
from qforge.runtime.lowering import lowered
from qforge.runtime.native_model import NativeModel
from qforge.runtime.weights import Head, Layer, Weights
from qforge.types import ModelSpec


def load(model: Model, threads: int | None = None, activations: str = "fp") -> NativeModel | Weights:
    """All weights, packed: for the native decoder, or for the reference where there is no native module. Raises as `read` does."""
    weights = read(model, threads, activations)
    return lowered(weights) if missing() is None else weights


def read(model: Model, threads: int | None = None, activations: str = "fp") -> Weights:
    """All weights, packed as the reference decoder takes them.

    `activations` is `fp`, or `int16` or `int8`: rounded on the fly where a kernel does that.

    Raises:
        UnsupportedError: a family that the runtime does not list; the message says what runs it.
        ModelError: a tensor is missing or damaged.
    """
    reason = supports(model.spec)
    if reason is not None or model.spec is None:
        raise UnsupportedError(f"'{model.source}' cannot run on the built-in runtime: {reason}; transformers loads it as it is, and eval --engine transformers measures it")
    reader = _Reader(model, model.spec, threads, activations)
    layers = [reader.layer(i) for i in range(model.spec.num_layers)]
    return Weights(model.spec, layers, reader.norm("model.norm"), reader.head())


class _Reader:
    """Reads weights by module name."""

    def __init__(self, model: Model, spec: ModelSpec, threads: int | None, activations: str) -> None:
        self._model, self._spec, self._threads, self._activations = model, spec, threads, activations
        self._names = set(model.weights.names())

    def layer(self, index: int) -> Layer:
        """All of one layer."""
        spec, at = self._spec, f"model.layers.{index}."
        q_norm, k_norm = (self.norm(f"{at}self_attn.{n}_norm") for n in "qk") if spec.qk_norm else (None, None)
        attention = AttentionParameters(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.layer_windows[index], spec.attention_scale, q_norm, k_norm, spec.norm_eps,
        )  # fmt: skip
        mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        return Layer(
            input_norm=self.norm(at + "input_layernorm"),
            qkv=self._joined([f"{at}self_attn.{n}_proj" for n in "qkv"]),
            attention=attention,
            output=self._linear(at + "self_attn.o_proj"),
            post_attention_norm=self.norm(at + "post_attention_layernorm") if spec.post_norms else None,
            mlp_norm=self.norm(at + mlp_norm),
            gate_up=self._joined([f"{at}mlp.{n}_proj" for n in ("gate", "up")]),
            down=self._linear(at + "mlp.down_proj"),
            post_mlp_norm=self.norm(at + "post_feedforward_layernorm") if spec.post_norms else None,
            rope=spec.layer_ropes[index],
        )

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight, fp32, with the family's offset."""
        return (self._model.weights.read(f"{name}.weight").float() + self._spec.norm_offset).contiguous()

    def head(self) -> Head:
        """Embedding and output head; one copy where the model ties them."""
        table = self._model.weights.read("model.embed_tokens.weight")
        if "lm_head" in self._model.schemes or (not self._spec.tied_head and "lm_head.weight" in self._names):
            return Head(table.contiguous(), self._linear("lm_head"))
        logits = linear(Dense(table), self._threads)
        packed = logits.parts[0].packed
        return Head(table if packed is None else packed.tiles, logits)

    def _linear(self, name: str) -> Linear:
        return linear(self._weight(name), self._threads, self._activations)

    def _joined(self, names: Sequence[str]) -> Linear:
        return joined([self._weight(n) for n in names], self._threads, self._activations)

    def _weight(self, name: str) -> QuantizedLinear | Dense:
        if name in self._model.schemes:
            return self._model.linear(name)
        bias = self._model.weights.read(f"{name}.bias") if f"{name}.bias" in self._names else None
        return Dense(self._model.weights.read(f"{name}.weight"), bias)
