"""Models quantized by RTN in memory, for tests of exporters: what a run's artifact is when it is opened again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from qforge import numerics
from qforge.models.model import Model
from qforge.models.weights import TensorInfo
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse

_FALCON = (".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight")
_PROJECTIONS = ("_proj.weight", *_FALCON, ".w1.weight", ".w2.weight", ".w3.weight")  # the last three: of Mixtral's experts


def rtn(model, text="int4-g32-sym", overrides=None, head=False, ignore=()):
    """Schemes and RTN linears of a model: `text` for all projections, `overrides` by the last part of the name."""
    names = [n.removesuffix(".weight") for n in model.weights.names() if n.endswith(_PROJECTIONS)]
    last = {n: n.rsplit(".", 1)[-1] for n in names}
    schemes: dict[str, Scheme] = {n: parse((overrides or {}).get(last[n], text)) for n in names if last[n] not in ignore}
    if head:
        schemes["lm_head"] = parse(text)

    def linear(name: str) -> QuantizedLinear:
        stored = f"{name}.weight" if f"{name}.weight" in model.weights.names() else model.tied[f"{name}.weight"]
        weight = model.weights.read(stored).float()
        scheme = schemes[name]
        bias = model.weights.read(f"{name}.bias") if f"{name}.bias" in model.weights.names() else None
        return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme), upper=numerics.super_scales(weight, scheme), bias=bias)

    return schemes, linear


@dataclass(frozen=True)
class Quantized(Model):
    """A model whose linears come from a function."""

    linears: Callable[[str], QuantizedLinear] | None = None

    def linear(self, name: str) -> QuantizedLinear:
        return self.linears(name)


class _Dequantized:
    def __init__(self, source, schemes, linear):
        self.source, self.schemes, self.linear = source, schemes, linear

    def names(self):
        return self.source.names() + [f"{n}.weight" for n in self.schemes if f"{n}.weight" not in self.source.names()]

    def _module(self, name):
        return name.removesuffix(".weight") if name.endswith(".weight") and name.removesuffix(".weight") in self.schemes else None

    def info(self, name):
        stored = name if name in self.source.names() else "model.embed_tokens.weight"
        return TensorInfo(self.source.info(stored).shape, torch.float32) if self._module(name) else self.source.info(name)

    def read(self, name):
        return numerics.dequantize(self.linear(self._module(name))) if self._module(name) else self.source.read(name)

    def fingerprint(self):
        return "test"


def quantized(model: Model, text="int4-g32-sym", **options) -> Quantized:
    """The model with RTN linears, as if opened from its artifact (a quantized tied head comes untied)."""
    schemes, linear = rtn(model, text, **options)
    values = {f.name: getattr(model, f.name) for f in fields(Model)}
    config = type(model.config).from_dict(model.config.to_dict())
    if "lm_head" in schemes:
        config.tie_word_embeddings = False
    return Quantized(**values | {"config": config, "weights": _Dequantized(model.weights, schemes, linear), "schemes": schemes}, linears=linear)
