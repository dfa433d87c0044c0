"""One decoder for all families that a ModelSpec can describe: token embedding, layers over a paged cache, norm, output head.

Letters: T tokens of a step, L rows whose logits are wanted, V vocabulary, W hidden width.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qforge.ops.layers import AttentionParameters, Batch, LayerCache, LayerOps
from qforge.runtime import rope
from qforge.runtime.linears import Head, Linear
from qforge.runtime.rope import RopeTable
from qforge.runtime.step import StepInput
from qforge.types import ModelSpec, RopeSpec

# Families whose greedy tokens and logits the tests hold against transformers.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")


def supports(spec: ModelSpec | None) -> str | None:
    """None if the decoder runs such a model; otherwise the reason why not."""
    if spec is None or spec.family not in FAMILIES:
        return f"the built-in runtime does not list {'this family' if spec is None else f'the family {spec.family!r}'} (it lists {', '.join(FAMILIES)})"
    if spec.head_dim % 2:
        return f"its head size {spec.head_dim} is odd"
    return next((reason for r in spec.layer_ropes if (reason := rope.supports(r)) is not None), None)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's weights. Norm weights are fp32 and hold the family's offset already; the two post norms are None where the family has none."""

    input_norm: torch.Tensor
    qkv: Linear
    attention: AttentionParameters
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None
    rope: RopeSpec


class Decoder:
    """A `Runner`: owns weights and cache.

    Args:
        layers, norm, head: the weights, from `loader`.
        num_blocks, block_size: the cache.
    """

    def __init__(self, spec: ModelSpec, layers: list[Layer], norm: torch.Tensor, head: Head, ops: LayerOps, *, num_blocks: int, block_size: int) -> None:
        self.spec, self.layers, self._norm, self._head, self._ops = spec, layers, norm, head, ops
        self._ropes = {layer.rope: RopeTable(layer.rope, spec.head_dim) for layer in layers}
        self._caches = [ops.cache(num_blocks, block_size, spec.num_kv_heads, spec.head_dim) for _ in layers]

    @torch.inference_mode()
    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`."""
        with _one_torch_thread():
            batch = Batch(step.positions, step.slot_mapping, step.block_tables, step.query_starts)
            reach = int(step.context_lens.max())
            x = self._head.embed(step.tokens)
            if self.spec.embedding_scale != 1.0:
                x = x * torch.tensor(self.spec.embedding_scale)
            for layer, cache in zip(self.layers, self._caches, strict=True):
                x = self._layer(x, layer, cache, self._ropes[layer.rope].upto(reach), batch)
            if len(step.logit_indices) < len(x):
                x = x[step.logit_indices]
            return self._head.logits(self._ops.norm(x, self._norm, self.spec.norm_eps))

    def kernels(self) -> dict[str, int]:
        """How many products each kernel runs."""
        products = [p for layer in self.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return dict(Counter(p.kernel for p in [*products, self._head.logits]))

    def _layer(self, x: torch.Tensor, layer: Layer, cache: LayerCache, table: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        ops, eps = self._ops, self.spec.norm_eps
        a = layer.output(ops.attention(layer.qkv(ops.norm(x, layer.input_norm, eps)), layer.attention, cache, table, batch))
        x = x + (a if layer.post_attention_norm is None else ops.norm(a, layer.post_attention_norm, eps))
        m = layer.down(ops.gate(layer.gate_up(ops.norm(x, layer.mlp_norm, eps)), self.spec.hidden_act))
        return x + (m if layer.post_mlp_norm is None else ops.norm(m, layer.post_mlp_norm, eps))


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """What is left to torch here is small; its threads, spinning after each operation, would take cores from the native pool. Only within a step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
