"""A model whose linears are rounded to nearest as they are read: nothing is calibrated, nothing is stored."""

from __future__ import annotations

from dataclasses import fields

from qforge import numerics
from qforge.models.model import Model
from qforge.models.tying import HEAD
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme


class RoundedModel(Model):
    """The same model; the linears in `schemes` are rounded when they are asked for, a tied head from the embedding's weight."""

    def linear(self, name: str) -> QuantizedLinear:
        """See `Model.linear`."""
        names = set(self.weights.names())
        own = f"{name}.weight" in names
        weight = self.weights.read(f"{name}.weight" if own else "model.embed_tokens.weight").float()
        bias = self.weights.read(f"{name}.bias") if f"{name}.bias" in names else None
        return numerics.quantize(weight, self.schemes[name], *numerics.minmax_parameters(weight, self.schemes[name]), bias=bias)


def rounded(model: Model, scheme: Scheme) -> Model:
    """A plain model of a family that the runtime lists with all its linears in one scheme, the head among them; a quantized one as it is."""
    if model.schemes:
        return model
    linears = [n.removesuffix(".weight") for n in model.weights.names() if n.endswith("_proj.weight")]
    return RoundedModel(**{f.name: getattr(model, f.name) for f in fields(model)} | {"schemes": dict.fromkeys([*linears, HEAD], scheme)})
