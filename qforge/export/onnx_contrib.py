"""The parts of an ONNX decoder in ONNX Runtime's contributed operators: SimplifiedLayerNormalization and GroupQueryAttention, which rotates, caches and attends in one.

GroupQueryAttention takes the sequences of a batch padded at the right; where a sequence stands is told by how many ones its row of the mask has.

Letters: B batch, S new tokens, H query heads, D head size, M positions.
"""

from __future__ import annotations

import torch
from onnx import TensorProto

from qforge.export.onnx_decoder import PAST, PRESENT, amplitudes
from qforge.export.onnx_graph import CONTRIB, Graph
from qforge.export.onnx_linears import Linears
from qforge.runtime.rope import inverse_frequencies
from qforge.runtime.rope_table import RopeTable
from qforge.types import ModelSpec, RopeSpec


class ContribParts:
    """The parts (see `onnx_decoder.Parts`); activations are fp32."""

    def __init__(self, graph: Graph, spec: ModelSpec, linears: Linears) -> None:
        self._graph, self._spec, self._linears = graph, spec, linears
        ones = graph.op("ReduceSum", "attention_mask", graph.ints(1), name="/model/lengths/ReduceSum", keepdims=0)
        last = graph.op("Sub", ones, graph.ints(1), name="/model/lengths/Sub")
        self._last = graph.op("Cast", last, name="/model/lengths/Cast", to=TensorProto.INT32)
        width = graph.op("Gather", graph.op("Shape", "attention_mask", name="/model/total/Shape"), graph.constant(1, TensorProto.INT64), name="/model/total/Gather")
        self._total = graph.op("Cast", width, name="/model/total/Cast", to=TensorProto.INT32)
        self._tables: dict[RopeSpec, tuple[str, str]] = {}

    def norm(self, x: str, module: str, name: str) -> str:
        """See `Parts.norm`."""
        weight = self._linears.vector(f"{module}.weight", self._spec.norm_offset)
        return self._graph.op("SimplifiedLayerNormalization", x, weight, name=f"{name}/SimplifiedLayerNormalization", axis=-1, epsilon=self._spec.norm_eps, stash_type=1)

    def attention(self, q: str, k: str, v: str, layer: int, name: str) -> str:
        """See `Parts.attention`."""
        spec = self._spec
        if spec.qk_norm:
            q, k = (self._heads_norm(x, heads, layer, part, name) for x, heads, part in ((q, spec.num_heads, "q"), (k, spec.num_kv_heads, "k")))
        cache = [PAST % (layer, part) for part in ("key", "value")]
        scale, amplitude = amplitudes(spec, layer)
        cosines, sines = self._table(spec.layer_ropes[layer], amplitude)
        return self._graph.op(
            "GroupQueryAttention", q, k, v, *cache, self._last, self._total, cosines, sines, name=f"{name}/GroupQueryAttention", domain=CONTRIB,
            out=(f"{name}/GroupQueryAttention", *(PRESENT % (layer, part) for part in ("key", "value"))), num_heads=spec.num_heads, kv_num_heads=spec.num_kv_heads,
            scale=scale, local_window_size=spec.layer_windows[layer] or -1, do_rotary=1,
            rotary_interleaved=int(spec.layer_ropes[layer].interleaved),
        )  # fmt: skip

    def _heads_norm(self, x: str, heads: int, layer: int, part: str, name: str) -> str:
        g, size = self._graph, self._spec.head_dim
        module, at = f"model.layers.{layer}.self_attn.{part}_norm", f"{name}/{part}_norm"
        if self._spec.whole_qk_norm:
            return self.norm(x, module, at)
        split = g.op("Reshape", x, g.ints(0, 0, heads, size), name=f"{at}/Reshape")
        normed = self.norm(split, module, at)
        return g.op("Reshape", normed, g.ints(0, 0, heads * size), name=f"{at}/Join")

    def _table(self, rope: RopeSpec, amplitude: float) -> tuple[str, str]:
        """Cosines and sines `[M, D / 2]`, of as many dimensions as are rotated, times their amplitude, once for each kind of rotation."""
        if rope not in self._tables:
            at, count = f"model.rope.{len(self._tables)}", self._spec.max_positions
            table = RopeTable(inverse_frequencies(rope, rope.turned(self._spec.head_dim)).numpy(), rope).upto(count)
            cos, sin = (torch.from_numpy(t[:count].copy()) * amplitude for t in table)
            self._tables[rope] = self._graph.weight(f"{at}.cos", cos), self._graph.weight(f"{at}.sin", sin)
        return self._tables[rope]
