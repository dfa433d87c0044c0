"""The decoder as one native call a step (kernels/include/qforge/decoder.h): hands over addresses once, and flat arrays at each step.

Bits do not depend on the batch, the cut of a prompt, the place of blocks, or threads.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from qforge.ops.native import context, module
from qforge.ops.native_cache import NativeCache
from qforge.ops.packing import Tiles
from qforge.runtime.linears import Linear, Part, Product
from qforge.runtime.rope import RopeTable
from qforge.runtime.sequence import Sequence
from qforge.runtime.step import StepInput
from qforge.runtime.weights import Layer, Weights

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# `Sampling` of kernels/include/qforge/sampler.h
_SAMPLING = np.dtype([("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "u8"), ("position", "i8")])


class NativeDecoder:
    """A `Runner`.

    Args:
        kv_cache: how keys and values are stored: `fp32`, `fp16` or `int8` (a scale for each key and each value).
    """

    def __init__(self, weights: Weights, *, num_blocks: int, block_size: int, threads: int | None = None, kv_cache: str = "fp32") -> None:
        native: Any = module()
        self.spec, self._weights, self._native = weights.spec, weights, native
        self._tables = {layer.rope: RopeTable(layer.rope, self.spec.head_dim) for layer in weights.layers}
        self._caches = [NativeCache(kv_cache, num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_dim) for _ in weights.layers]
        layers = [self._layer(layer, cache) for layer, cache in zip(weights.layers, self._caches, strict=True)]
        activation = {"silu": self._native.Activation.SILU, "gelu_pytorch_tanh": self._native.Activation.GELU_TANH}[self.spec.hidden_act]
        self._decoder = self._native.Decoder(
            context(threads), self.spec.hidden_size, self.spec.intermediate_size, self.spec.vocab_size, self.spec.norm_eps, activation, self._embedding(),
            weights.norm.data_ptr(), layers, self._product(weights.head.logits),
        )  # fmt: skip
        self._reach = 0

    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`."""
        logits = torch.empty(len(step.logit_indices), self.spec.vocab_size)
        self._decoder.logits(*self._arguments(step), logits.data_ptr())
        return logits

    def choose(self, step: StepInput, sequences: list[Sequence]) -> list[int]:
        """See `Runner.choose`."""
        chosen = np.empty(len(step.logit_indices), np.int64)
        sampling = None
        if any(s.params.temperature for s in sequences):
            rows = [(p.temperature, p.top_k, p.top_p, p.min_p, s.seed, len(s.tokens)) for s in sequences for p in (s.params,)]
            sampling = np.array(rows, _SAMPLING)
        self._decoder.choose(*self._arguments(step), 0 if sampling is None else sampling.ctypes.data, chosen.ctypes.data)
        tokens: list[int] = chosen.tolist()
        return tokens

    def kernels(self) -> dict[str, int]:
        """See `Runner.kernels`."""
        return self._weights.kernels()

    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return self._weights.nbytes()

    def _arguments(self, step: StepInput) -> tuple[int, ...]:
        reach = int(step.context_lens.max())
        if reach > self._reach:
            tables = {rope: table.upto(reach) for rope, table in self._tables.items()}
            self._decoder.set_ropes([(cosines.data_ptr(), sines.data_ptr()) for cosines, sines in tables.values()])
            self._reach = min(len(cosines) for cosines, _ in tables.values())
        arrays = (step.tokens, step.positions, step.slot_mapping, step.block_tables, step.query_starts, step.logit_indices)
        return *(a.ctypes.data for a in arrays), len(step.tokens), len(step.context_lens), step.block_tables.shape[1], len(step.logit_indices)

    def _layer(self, layer: Layer, cache: NativeCache) -> Any:
        a = layer.attention
        norms = (layer.input_norm, layer.post_attention_norm, layer.mlp_norm, layer.post_mlp_norm, a.q_norm, a.k_norm)
        products = [self._product(p) for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        rope = list(self._tables).index(layer.rope)
        return self._native.Layer([0 if n is None else n.data_ptr() for n in norms], *products, cache.view, a.num_heads, a.window, rope, a.scale)

    def _product(self, linear: Linear) -> list[Any]:
        return [self._part(part) for part in linear.parts]

    def _part(self, part: Part) -> Any:
        if part.packed is None or part.packed.arithmetic is None:
            return self._native.Part(part.out_features, part.in_features, _elsewhere(part.product, part.in_features, part.out_features))
        p = part.packed
        static = 0.0 if p.input_scale is None else float(p.input_scale)
        arithmetic = getattr(self._native.Arithmetic, p.arithmetic or "")
        return self._native.Part(p.view, arithmetic, static, p.tiles.in_features, 0 if p.tiles.gather is None else p.tiles.gather.data_ptr())

    def _embedding(self) -> Any:
        table, shared = self._weights.head.table, self._weights.head.logits.parts[0].packed
        if isinstance(table, Tiles):
            assert shared is not None
            assert shared.tiles is table
            return self._native.Embedding(shared.view, 0 if table.gather is None else table.gather.data_ptr(), self.spec.embedding_scale)
        return self._native.Embedding(getattr(self._native.Format, _DTYPES[table.dtype]), table.data_ptr(), self.spec.embedding_scale)


def _elsewhere(product: Product, in_features: int, out_features: int) -> Any:
    """A product that no native kernel runs, as the native step calls it: at addresses."""

    def run(x: int, rows: int, y: int, y_stride: int) -> None:
        inputs = _floats(x, rows * in_features).view(rows, in_features)
        outputs = _floats(y, (rows - 1) * y_stride + out_features).as_strided((rows, out_features), (y_stride, 1))
        with torch.inference_mode():
            outputs.copy_(product(inputs))

    return run


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
