"""The linears of an ONNX decoder: quantized ones as MatMulNBits or as DequantizeLinear before MatMul, the others in the dtype in which the model stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from onnx import TensorProto

from qforge.export.hf import weight_shape
from qforge.export.onnx_graph import CONTRIB, TYPES, Graph, Piece, Weight
from qforge.layouts.onnx_blocks import MatMulNBits, OnnxDequantize
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.numerics import largest
from qforge.scheme import Granularity, Number, Per, Scheme

EMBEDDING = "model.embed_tokens"
_FLOATS = {Number.FP8_E4M3: TensorProto.FLOAT8E4M3FN, Number.FP8_E5M2: TensorProto.FLOAT8E5M2}


@dataclass(frozen=True, slots=True)
class Linears:
    """Adds a model's linears to a graph.

    Attributes:
        accuracy_level: of MatMulNBits: 1 computes in fp32, 4 rounds activations to 8 bits; None takes the standard operators.
        compute: dtype of activations.
    """

    model: Model
    graph: Graph
    accuracy_level: int | None
    compute: torch.dtype

    def __call__(self, x: str, module: str) -> str:
        """`x [..., I] -> [..., O]`."""
        name = f"/{module.replace('.', '/')}"
        if module not in self.model.schemes:
            weight = self.cast(self.stored(f"{module}.weight"), self.model.weights.info(f"{module}.weight").dtype, f"{name}/Cast")
            y = self._product(x, weight, name)
        else:
            y = self._packed(x, module, name) if self.accuracy_level is not None else self._dequantized(x, module, name)
        bias = f"{module}.bias"
        return self.graph.op("Add", y, self.vector(bias), name=f"{name}/Add") if bias in self.model.weights.names() else y

    def embed(self, tokens: str) -> str:
        """Rows of the embedding."""
        stored = f"{EMBEDDING}.weight"
        return self.cast(self.graph.op("Gather", self.stored(stored), tokens, name="/model/embed_tokens/Gather"), self.model.weights.info(stored).dtype, "/model/embed_tokens/Cast")

    def head(self, x: str) -> str:
        """Logits, fp32; from the embedding where the model ties the two."""
        names = self.model.weights.names()
        if HEAD in self.model.schemes or (not self.model.config.tie_word_embeddings and f"{HEAD}.weight" in names):
            y = self(x, HEAD)
        else:
            y = self._product(x, self.cast(f"{EMBEDDING}.weight", self.model.weights.info(f"{EMBEDDING}.weight").dtype, "/lm_head/Cast"), "/lm_head")
        return y if self.compute is torch.float32 else self.graph.op("Cast", y, name="/lm_head/logits", to=TensorProto.FLOAT)

    def stored(self, name: str) -> str:
        """A tensor of the model as it stores it."""
        info = self.model.weights.info(name)
        return self.graph.weights(Piece((Weight(name, TYPES[info.dtype], info.shape),), lambda: {name: self.model.weights.read(name)}))[0]

    def vector(self, name: str, offset: float = 0.0, dtype: torch.dtype | None = None) -> str:
        """A bias or a norm's weight (plus an offset), in the dtype of activations or another."""
        info, kind = self.model.weights.info(name), dtype or self.compute
        return self.graph.weights(Piece((Weight(name, TYPES[kind], info.shape),), lambda: {name: (self.model.weights.read(name).float() + offset).to(kind)}))[0]

    def cast(self, value: str, dtype: torch.dtype, name: str) -> str:
        """A value of the given dtype in that of activations."""
        return value if dtype is self.compute else self.graph.op("Cast", value, name=name, to=TYPES[self.compute])

    def _product(self, x: str, weight: str, name: str) -> str:
        """With a weight `[O, I]`, transposed once when the model is loaded."""
        return self.graph.op("MatMul", x, self.graph.op("Transpose", weight, name=f"{name}/Transpose", perm=[1, 0]), name=f"{name}/MatMul")

    def _packed(self, x: str, module: str, name: str) -> str:
        layout, scheme, (rows, columns) = MatMulNBits(), self.model.schemes[module], weight_shape(self.model, module)
        weights = {part: Weight(f"{module}.{part}", TYPES[dtype], shape) for part, (shape, dtype) in layout.shapes(scheme, rows, columns).items()}
        operands = self._pieces(module, layout, weights)
        sizes: dict[str, Any] = {"K": columns, "N": rows, "bits": layout.bits(scheme), "block_size": layout.block(scheme, columns)}
        return self.graph.op("MatMulNBits", x, *operands, name=f"{name}/MatMulNBits", domain=CONTRIB, accuracy_level=self.accuracy_level, **sizes)

    def _dequantized(self, x: str, module: str, name: str) -> str:
        layout, scheme, (rows, columns) = OnnxDequantize(), self.model.schemes[module], weight_shape(self.model, module)
        shapes = layout.shapes(scheme, rows, columns)
        scales = ("scale", "input_scale")
        weights = {p: Weight(f"{module}.{p}", TYPES[self.compute] if p in scales else code_type(scheme), shape) for p, (shape, _) in shapes.items()}
        names = dict(zip(weights, self._pieces(module, layout, weights), strict=True))
        blocked = scheme.granularity.per in (Per.GROUP, Per.BLOCK)
        where: dict[str, Any] = {"axis": 0, "block_size": scheme.granularity.columns} if blocked else {"axis": 1}
        operands = [names[p] for p in ("weight", "scale", "zero_point") if p in names]
        weight = self.graph.op("DequantizeLinear", *operands, name=f"{name}/DequantizeLinear", **where)
        return self.graph.op("MatMul", self._rounded(x, scheme, columns, names.get("input_scale"), name), weight, name=f"{name}/MatMul")

    def _pieces(self, module: str, layout: MatMulNBits | OnnxDequantize, weights: Mapping[str, Weight]) -> list[str]:
        """The packed parts of a linear, read together."""

        def read() -> dict[str, torch.Tensor]:
            packed = layout.pack(self.model.linear(module))
            return {w.name: packed[p].to(self.compute) if w.type == TYPES[self.compute] else packed[p] for p, w in weights.items()}

        return self.graph.weights(Piece(tuple(weights.values()), read))

    def _rounded(self, x: str, scheme: Scheme, columns: int, static: str | None, name: str) -> str:
        """Activations as the scheme rounds them, with a stored scale, or with one found for each token (or group of its inputs)."""
        a, g, at = scheme.activations, self.graph, f"{name}/input"
        if a is None:
            return x
        kind = _FLOATS.get(a.number, TensorProto.INT8)
        if static is not None:
            whole = kind == TensorProto.INT8 or self.compute is torch.float16
            return self._pair(x, static, kind, at) if whole else self._scaled_pair(x, static, kind, at)
        size = a.granularity.columns or columns
        grouped = x if size == columns else g.op("Reshape", x, g.ints(0, 0, columns // size, size), name=f"{at}/Groups")
        rounded = self._scaled_pair(grouped, self._token_scale(grouped, a.number, at), kind, at)
        return rounded if size == columns else g.op("Reshape", rounded, g.ints(0, 0, columns), name=f"{at}/Join")

    def _pair(self, x: str, scale: str, kind: int, at: str) -> str:
        zero = self.graph.constant(0, kind)
        codes = self.graph.op("QuantizeLinear", x, scale, zero, name=f"{at}/QuantizeLinear")
        return self.graph.op("DequantizeLinear", codes, scale, zero, name=f"{at}/DequantizeLinear")

    def _scaled_pair(self, x: str, scale: str, kind: int, at: str) -> str:
        """The pair at scale 1 between a division and a product: OpenVINO 2026.4 takes no scales that are found as it runs, and ONNX Runtime 1.31 fuses an FP8 pair that stands
        directly before MatMul into an operator for integers, and then refuses the file.
        """
        one = self.graph.constant(1.0, TYPES[self.compute])
        unit = self.graph.op("Div", x, scale, name=f"{at}/Div")
        return self.graph.op("Mul", self._pair(unit, one, kind, at), scale, name=f"{at}/Mul")

    def _token_scale(self, x: str, number: Number, at: str) -> str:
        """`[..., 1]`: the largest magnitude of the last dimension over that of the type; 1 for nothing but zeros."""
        g, kind = self.graph, TYPES[self.compute]
        amount = g.op("ReduceMax", g.op("Abs", x, name=f"{at}/Abs"), g.ints(-1), name=f"{at}/ReduceMax", keepdims=1)
        scale = g.op("Div", amount, g.constant(largest(Scheme(number, Granularity(Per.TENSOR))), kind), name=f"{at}/Scale")
        return g.op("Where", g.op("Equal", scale, g.constant(0.0, kind), name=f"{at}/Equal"), g.constant(1.0, kind), scale, name=f"{at}/Where")


def code_type(scheme: Scheme) -> int:
    """The TensorProto type in which DequantizeLinear is given the codes of a scheme."""
    if scheme.number in _FLOATS:
        return int(_FLOATS[scheme.number])
    narrow = OnnxDequantize.bits(scheme) == 4
    return int((TensorProto.INT4 if narrow else TensorProto.INT8) if scheme.symmetric else (TensorProto.UINT4 if narrow else TensorProto.UINT8))
