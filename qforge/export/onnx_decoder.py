"""A decoder with a key-value cache as an ONNX graph, built from a ModelSpec: what all forms share. The parts that they write differently are in onnx_contrib and onnx_standard.

Letters: B batch, S new tokens of a sequence, P tokens in the cache, T = P + S, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from onnx import TensorProto

from qforge.export.onnx_graph import TYPES, Graph
from qforge.export.onnx_linears import Linears
from qforge.models import names
from qforge.types import ModelSpec


class Parts(Protocol):
    """What a form writes in its own operators."""

    def norm(self, x: str, module: str, name: str) -> str:
        """Root mean square norm over the last dimension, by the weight of `module`."""

    def attention(self, q: str, k: str, v: str, layer: int, name: str) -> str:
        """`q [B, S, H D]`, `k` and `v [B, S, K D]`, before norms and rotation -> `[B, S, H D]`; makes `present.<layer>.key` and `.value`."""


PAST, PRESENT = "past_key_values.%d.%s", "present.%d.%s"


def inputs(graph: Graph, spec: ModelSpec, *, positions: bool, compute: torch.dtype) -> None:
    """The graph's inputs, named as onnxruntime-genai and optimum name them: tokens, mask of all T, with `positions` the positions of the new ones, the cache."""
    graph.input("input_ids", TensorProto.INT64, ("batch_size", "sequence_length"))
    graph.input("attention_mask", TensorProto.INT64, ("batch_size", "total_sequence_length"))
    if positions:
        graph.input("position_ids", TensorProto.INT64, ("batch_size", "sequence_length"))
    for i in range(spec.num_layers):
        for part in ("key", "value"):
            graph.input(PAST % (i, part), TYPES[compute], ("batch_size", spec.num_kv_heads, "past_sequence_length", spec.head_dim))


def outputs(graph: Graph, spec: ModelSpec, logits: str, compute: torch.dtype) -> None:
    """The graph's outputs: fp32 logits `[B, S, V]`, and the cache `[B, K, T, D]` of each layer."""
    graph.output(logits, "logits", TensorProto.FLOAT, ("batch_size", "sequence_length", spec.vocab_size))
    for i in range(spec.num_layers):
        for part in ("key", "value"):
            graph.declare(PRESENT % (i, part), TYPES[compute], ("batch_size", spec.num_kv_heads, "total_sequence_length", spec.head_dim))


def decoder(graph: Graph, spec: ModelSpec, linears: Linears, parts: Parts) -> str:
    """Tokens -> logits; returns the logits' name."""
    x = linears.embed("input_ids")
    x = _scaled(graph, x, spec.embedding_scale, TYPES[linears.compute], "/model/embed_tokens/Mul")
    for i in range(spec.num_layers):
        x = _layer(graph, spec, linears, parts, x, i)
    logits = linears.head(parts.norm(x, "model.norm", "/model/norm"))
    return _scaled(graph, logits, spec.logits_scale, TensorProto.FLOAT, "/lm_head/Scale")


def _scaled(graph: Graph, x: str, scale: float, kind: int, name: str) -> str:
    return x if scale == 1.0 else graph.op("Mul", x, graph.constant(scale, kind), name=name)


def _layer(graph: Graph, spec: ModelSpec, linears: Linears, parts: Parts, x: str, index: int) -> str:
    module, name = f"model.layers.{index}", f"/model/layers.{index}"

    def norm(x: str, part: str | None) -> str:
        return x if part is None else parts.norm(x, f"{module}.{part}", f"{name}/{part}")

    input_norm, post_attention_norm, mlp_norm, post_mlp_norm = spec.norms
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, k, v = _several(graph, linears, norm(x, input_norm), [f"{module}.{part}" for part in names.attention_inputs(spec.family)], (queries, keys, keys))
    a = linears(parts.attention(q, k, v, index, f"{name}/self_attn"), f"{module}.self_attn.o_proj")
    a = norm(a, post_attention_norm)
    x = graph.op("Add", x, _scaled(graph, a, spec.residual_scale, TYPES[linears.compute], f"{name}/self_attn/Scale"), name=f"{name}/self_attn/Add")
    m = norm(_mlp(graph, spec, linears, norm(x, mlp_norm), module, name), post_mlp_norm)
    return graph.op("Add", x, _scaled(graph, m, spec.residual_scale, TYPES[linears.compute], f"{name}/mlp/Scale"), name=f"{name}/mlp/Add")


def _several(graph: Graph, linears: Linears, x: str, modules: Sequence[str], sizes: Sequence[int]) -> Sequence[str]:
    """The outputs of linears with the same input, or of one that holds all of them, which has so many of each."""
    found = [linears(x, module) for module in modules]
    if len(found) == len(sizes):
        return found
    at = f"/{modules[0].replace('.', '/')}/Split"
    out = tuple(f"{at}/{i}" for i in range(len(sizes)))
    graph.op("Split", found[0], graph.ints(*sizes), name=at, out=out, axis=-1)
    return out


def amplitudes(spec: ModelSpec, layer: int) -> tuple[float, float]:
    """What scores are multiplied by, and what cosines and sines: where a whole head is rotated, all that is left to the scores."""
    rope = spec.layer_ropes[layer]
    return (spec.attention_scale, rope.amplitude) if rope.rotated else (spec.score_scale(layer), 1.0)


def _mlp(graph: Graph, spec: ModelSpec, linears: Linears, x: str, module: str, name: str) -> str:
    ((inputs, down),) = names.mlps(spec.family, None)
    gate, up = _several(graph, linears, x, [f"{module}.{part}" for part in inputs], (spec.intermediate_size,) * 2)
    if spec.hidden_act == "silu":
        active = graph.op("Mul", gate, graph.op("Sigmoid", gate, name=f"{name}/mlp/Sigmoid"), name=f"{name}/mlp/Silu")
    else:
        active = graph.op("Gelu", gate, name=f"{name}/mlp/Gelu", approximate="tanh")
    return linears(graph.op("Mul", active, up, name=f"{name}/mlp/Mul"), f"{module}.{down}")
