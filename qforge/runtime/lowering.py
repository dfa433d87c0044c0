"""Packed tensors -> what the native step takes. Nothing is copied: the buffers are the tensors' own memory, and hold it."""

from __future__ import annotations

import ctypes

import torch

from qforge.ops.native import bytes_of
from qforge.ops.native_weight import Buffer
from qforge.ops.packing import Tiles
from qforge.runtime.linears import Linear, Part, Product
from qforge.runtime.native_model import Elsewhere, NativeEmbedding, NativeLayer, NativeMlp, NativeModel, NativePart, NativeProduct
from qforge.runtime.rope import inverse_frequencies
from qforge.runtime.weights import Layer, Weights

_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def lowered(weights: Weights) -> NativeModel:
    """The same model, for `NativeDecoder`."""
    spec = weights.spec
    frequencies = tuple(_buffer(inverse_frequencies(rope, spec.head_dim)) for rope in dict.fromkeys(spec.layer_ropes))
    return NativeModel(spec, frequencies, tuple(_layer(layer) for layer in weights.layers), _buffer(weights.norm), _embedding(weights), _product(weights.head.logits))


def _buffer(t: torch.Tensor) -> Buffer:
    found = bytes_of(t)
    assert found is not None
    return found


def _layer(layer: Layer) -> NativeLayer:
    a = layer.attention
    norms = (layer.input_norm, layer.post_attention_norm, layer.mlp_norm, layer.post_mlp_norm, a.q_norm, a.k_norm)
    router = None if layer.router is None else _product(layer.router)
    mlps = tuple(NativeMlp(_product(mlp.gate_up), _product(mlp.down)) for mlp in layer.mlps)
    return NativeLayer(tuple(bytes_of(n) for n in norms), _product(layer.qkv), _product(layer.output), router, mlps)


def _product(linear: Linear) -> NativeProduct:
    return NativeProduct(linear.kernel, tuple(_part(part) for part in linear.parts))


def _part(part: Part) -> NativePart:
    p = part.packed
    if p is None or p.arithmetic is None:
        weight = None if p is None else p.weight
        return NativePart(part.out_features, part.in_features, weight, elsewhere=_elsewhere(part.product, part.in_features, part.out_features), held=part.held)
    return NativePart(part.out_features, part.in_features, p.weight, p.arithmetic, 0.0 if p.input_scale is None else float(p.input_scale))


def _embedding(weights: Weights) -> NativeEmbedding:
    table = weights.head.table
    if isinstance(table, Tiles):
        shared = weights.head.logits.parts[0].packed
        assert shared is not None
        assert shared.tiles is table
        return NativeEmbedding(table.format, None)
    return NativeEmbedding(_FORMATS[table.dtype], _buffer(table))


def _elsewhere(product: Product, in_features: int, out_features: int) -> Elsewhere:
    """A product that no native kernel runs, as the native step calls it: at addresses."""

    def run(x: int, rows: int, y: int, y_stride: int) -> None:
        inputs = _floats(x, rows * in_features).view(rows, in_features)
        outputs = _floats(y, (rows - 1) * y_stride + out_features).as_strided((rows, out_features), (y_stride, 1))
        with torch.inference_mode():
            outputs.copy_(product(inputs))

    return run


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
