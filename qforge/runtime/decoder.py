"""One decoder for all families that a ModelSpec can describe, in plain PyTorch.

This one is the reference, and what runs where the native module is missing; `native_decoder` computes the same in one call a step.
Letters: T tokens of a step, L rows whose logits are wanted, V vocabulary, W hidden width.
"""

from __future__ import annotations

import numpy as np
import torch

from qforge.models.spec import FAMILIES
from qforge.ops.layers import Batch, LayerCache, TorchLayers
from qforge.runtime import rope
from qforge.runtime.rope_table import RopeTable
from qforge.runtime.sampler import sample
from qforge.runtime.sequence import Draw
from qforge.runtime.step import StepInput
from qforge.runtime.weights import Layer, Mlp, Weights
from qforge.types import ModelSpec


def supports(spec: ModelSpec | None) -> str | None:
    """None if the decoder runs such a model; otherwise the reason why not."""
    if spec is None:
        known = f"silu or gelu_pytorch_tanh; rope {' or '.join(kind for kind in rope.KINDS if kind != 'none')}; no soft-capping"
        return f"the built-in runtime does not list this family, or not its activation, rotary scaling or attention (it lists {', '.join(FAMILIES)}: {known})"
    if spec.head_dim % 2:
        return f"its head size {spec.head_dim} is odd"
    if not 1e-6 < spec.residual_scale < 1e6:
        return f"its residual multiplier {spec.residual_scale:g} leaves the range of fp32"
    return next((reason for r in spec.layer_ropes if (reason := rope.supports(r)) is not None), None)


class Decoder:
    """A `Runner`: right everywhere, and slow. Its bits may depend on how a prompt is cut into steps.

    Args:
        kv_cache: `fp32`, or `fp8` where the model has scales for it.
    """

    batch_invariant = False

    def __init__(self, weights: Weights, *, num_blocks: int, block_size: int, kv_cache: str = "fp32") -> None:
        self.spec, self._weights, self._ops = weights.spec, weights, TorchLayers()
        self._ropes = {r: RopeTable(rope.inverse_frequencies(r, self.spec.head_dim).numpy(), r) for r in dict.fromkeys(self.spec.layer_ropes)}
        scales = self.spec.kv_scales if kv_cache == "fp8" else [None] * len(weights.layers)
        self._caches = [self._ops.cache(num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_dim, s) for s in scales]

    @torch.inference_mode()
    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`."""
        tokens, positions, slots, tables, starts, wanted = (
            torch.from_numpy(np.asarray(a)) for a in (step.tokens, step.positions, step.slot_mapping, step.block_tables, step.query_starts, step.logit_indices)
        )
        batch, reach = Batch(positions, slots, tables.view(len(step.context_lens), -1), starts), max(step.context_lens)
        x = self._weights.head.embed(tokens)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale)
        for layer, cache in zip(self._weights.layers, self._caches, strict=True):
            cosines, sines = self._ropes[layer.rope].upto(reach)
            x = self._layer(x, layer, cache, (torch.from_numpy(cosines), torch.from_numpy(sines)), batch)
        x = x[wanted]
        return self._weights.head.logits(self._ops.norm(x, self._weights.norm, self.spec.norm_eps))

    def choose(self, step: StepInput, draws: list[Draw]) -> list[int]:
        """See `Runner.choose`."""
        return sample(self.step(step), draws)

    def kernels(self) -> dict[str, int]:
        """See `Runner.kernels`."""
        return self._weights.kernels()

    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return self._weights.nbytes()

    def _layer(self, x: torch.Tensor, layer: Layer, cache: LayerCache, table: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
        ops, eps = self._ops, self.spec.norm_eps
        a = layer.output(ops.attention(layer.qkv(ops.norm(x, layer.input_norm, eps)), layer.attention, cache, table, batch))
        x = x + ops.norm(a, layer.post_attention_norm, eps)
        m = self._mlp(ops.norm(x, layer.mlp_norm, eps), layer)
        return x + ops.norm(m, layer.post_mlp_norm, eps)

    def _mlp(self, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        """`[T, W]`: what the layer's MLP makes of x, or the sum of what a token's experts do (Shazeer et al., arXiv 1701.06538, equation 1, without noise)."""
        experts = self.spec.experts
        if layer.router is None or experts is None:
            return self._run(layer.mlps[0], x)
        shares = layer.router(x).softmax(-1)
        best, chosen = shares.topk(experts.active)
        if experts.normalized:
            best = best / best.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, slots = torch.where(chosen == number)
            y[rows] += best[rows, slots, None] * self._run(layer.mlps[number], x[rows])
        return y

    def _run(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        return mlp.down(self._ops.gate(mlp.gate_up(x), self.spec.hidden_act))
