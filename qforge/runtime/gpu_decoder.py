"""The decoder on a GPU: Triton's kernels for attention, norms, rotation and quantized products, cuBLAS for the others.

Activations have 16 bits, the residual stream and logits 32. Bits depend on the number of rows of a step, because tiles do.
Letters: T tokens of a step, L rows whose logits are wanted, V vocabulary, W hidden width, H query heads, K key/value heads, D head size, P positions.
"""

from __future__ import annotations

import numpy as np
import torch

from qforge.ops.triton.between import rms_norm, silu_mul
from qforge.ops.triton.cache import PagedCache, attention, empty_cache, rotate_and_store
from qforge.ops.triton.sampling import SamplingRows, most_likely, sample
from qforge.runtime import rope
from qforge.runtime.decode_graphs import Capture, DecodeGraphs
from qforge.runtime.gpu_batch import GpuBatch, moved
from qforge.runtime.places import Gpu
from qforge.runtime.rope_table import RopeTable
from qforge.runtime.sequence import Draw
from qforge.runtime.step import StepInput
from qforge.runtime.weights import Layer, Weights


class GpuDecoder:
    """A `Runner`.

    Args:
        weights: read for `place`.
        place: where they are.
        stored: the type of keys and values, as `ops.triton.cache.empty_cache` takes it.
        max_num_seqs: the most sequences of a step.
        capture: how a decode step is recorded once for each size of batch; None: not at all.
    """

    batch_invariant = False

    def __init__(self, weights: Weights, place: Gpu, *, num_blocks: int, block_size: int, stored: torch.dtype, max_num_seqs: int, capture: Capture | None = None) -> None:
        self.spec, self._weights, self._place = weights.spec, weights, place
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)  # Triton launches on the current one
        spec, reach = self.spec, min(self.spec.max_positions, num_blocks * block_size)
        scales = spec.kv_scales if stored is torch.float8_e4m3fn and spec.kv_scales else [None] * len(weights.layers)
        self._caches = [empty_cache(num_blocks, block_size, spec.num_kv_heads, spec.head_dim, stored, place.device, s) for s in scales]
        self._ropes = {r: self._table(RopeTable(rope.inverse_frequencies(r, spec.head_dim).numpy(), r), reach) for r in dict.fromkeys(spec.layer_ropes)}
        self.graphs: DecodeGraphs | None = None
        if capture is not None:
            self.graphs = DecodeGraphs(self._forward, place.device, max_num_seqs, -(-reach // block_size), reach, spec.vocab_size, capture)

    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`; logits are on the processor."""
        return self.logits(step).cpu()

    def choose(self, step: StepInput, draws: list[Draw]) -> list[int]:
        """See `Runner.choose`; only the tokens leave the device."""
        logits = self.logits(step)
        if not draws:
            return []
        if all(d.params.temperature == 0 for d in draws):
            return list(most_likely(logits).tolist())
        params = ((p.temperature, p.top_k, p.top_p, p.min_p, seed, position) for p, seed, position in draws)
        return list(sample(logits, SamplingRows.of(params, logits.device)).tolist())

    def kernels(self) -> dict[str, int]:
        """See `Runner.kernels`."""
        return self._weights.kernels()

    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return self._weights.nbytes()

    @torch.inference_mode()
    def logits(self, step: StepInput) -> torch.Tensor:
        """Those of `step`, on the device; valid until the next call."""
        recorded = None if self.graphs is None else self.graphs.logits(step)
        return self._forward(moved(step, self._place.device)) if recorded is None else recorded

    @torch.inference_mode()
    def _forward(self, batch: GpuBatch) -> torch.Tensor:
        """fp32 logits `[L, V]`."""
        eps = self.spec.norm_eps
        x = self._weights.head.embed(batch.tokens) * self.spec.embedding_scale
        more = x.to(self._place.dtype)
        residual = x - more  # each norm adds `more` to it
        for layer, cache in zip(self._weights.layers, self._caches, strict=True):
            a = layer.output(self._attend(layer.qkv(_norm(more, layer.input_norm, eps, residual)), layer, cache, batch))
            a = _norm(a, layer.post_attention_norm, eps)
            (mlp,) = layer.mlps
            m = mlp.down(self._gate(mlp.gate_up(_norm(a, layer.mlp_norm, eps, residual))))
            more = _norm(m, layer.post_mlp_norm, eps)
        if batch.wanted is not None:
            more, residual = more[batch.wanted], residual[batch.wanted]
        return self._weights.head.logits(_norm(more, self._weights.norm, eps, residual)).float()

    def _attend(self, qkv: torch.Tensor, layer: Layer, cache: PagedCache, batch: GpuBatch) -> torch.Tensor:
        """`qkv [T, (H + 2 K) D]` -> `[T, H D]`; keys and values go into the cache."""
        a = layer.attention
        norms = None if a.q_norm is None or a.k_norm is None else (a.q_norm, a.k_norm, a.norm_eps)
        if a.whole_norms and norms is not None:
            q, k, v = qkv.split([a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim], 1)
            qkv, norms = torch.cat((_norm(q.contiguous(), norms[0], a.norm_eps), _norm(k.contiguous(), norms[1], a.norm_eps), v), 1), None
        q = rotate_and_store(qkv, *self._ropes[layer.rope], batch.positions, batch.slots, a.num_heads, cache, norms)
        mixed = attention(q, cache, batch.tables, batch.starts, batch.lengths, longest=batch.longest, longest_context=batch.longest_context, scale=a.scale, window=a.window)
        return mixed.flatten(1)

    def _gate(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.hidden_act == "silu":
            return silu_mul(x)
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def _table(self, table: RopeTable, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[P, D / 2]` fp32."""
        cosines, sines = table.upto(positions)
        return tuple(torch.from_numpy(np.ascontiguousarray(t)).to(self._place.device) for t in (cosines, sines))  # type: ignore[return-value]


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of x, or of what `residual` becomes when x is added to it; the same without a norm where there is no weight."""
    if weight is None:
        return x if residual is None else residual.add_(x).to(x.dtype)
    y = rms_norm(x, weight, eps, residual)
    assert isinstance(y, torch.Tensor)
    return y
