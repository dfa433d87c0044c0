"""The parts of an ONNX decoder in standard operators only, for every engine that reads opset 21: norms, rotation, cache and attention spelled out.

Sequences of a batch may be padded anywhere: the mask says which tokens exist, `position_ids` where each stands.

Letters: B batch, S new tokens, P cached tokens, T = P + S, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
from onnx import TensorProto

from qforge.export.onnx_decoder import PAST, PRESENT, amplitudes
from qforge.export.onnx_graph import TYPES, Graph
from qforge.export.onnx_linears import Linears
from qforge.runtime.rope import inverse_frequencies
from qforge.types import ModelSpec, RopeSpec

_MASKED = {torch.float32: -1e9, torch.float16: -3e4}  # added to scores: exp() of it is 0, and a row without any token stays finite


class StandardParts:
    """The parts (see `onnx_decoder.Parts`). Norms and rotation are computed in fp32, attention in the dtype of activations."""

    def __init__(self, graph: Graph, spec: ModelSpec, linears: Linears) -> None:
        self._graph, self._spec, self._linears, self._compute = graph, spec, linears, linears.compute
        self._kind = TYPES[linears.compute]
        self._masks: dict[int, str] = {}
        self._ropes: dict[RopeSpec, tuple[str, str]] = {}
        self._shapes: dict[int, str] = {}
        at = "/model/mask"
        dim = graph.constant(1, TensorProto.INT64)
        new, total = (graph.op("Gather", graph.op("Shape", x, name=f"{at}/{x}/Shape"), dim, name=f"{at}/{x}/Gather") for x in ("input_ids", "attention_mask"))
        zero, one = graph.constant(0, TensorProto.INT64), graph.constant(1, TensorProto.INT64)
        self._width = graph.op("Unsqueeze", total, graph.ints(0), name=f"{at}/width")
        past = graph.op("Sub", total, new, name=f"{at}/past")
        self._rows = graph.op("Unsqueeze", graph.op("Range", past, total, one, name=f"{at}/rows/Range"), graph.ints(1), name=f"{at}/rows")
        self._columns = graph.op("Unsqueeze", graph.op("Range", zero, total, one, name=f"{at}/columns/Range"), graph.ints(0), name=f"{at}/columns")
        there = graph.op("Cast", "attention_mask", name=f"{at}/Cast", to=TensorProto.BOOL)
        self._there = graph.op("Unsqueeze", there, graph.ints(1, 2), name=f"{at}/there")

    def norm(self, x: str, module: str, name: str) -> str:
        """See `Parts.norm`."""
        g, spec, half = self._graph, self._spec, self._compute is not torch.float32
        x = g.op("Cast", x, name=f"{name}/Wide", to=TensorProto.FLOAT) if half else x
        square = g.op("ReduceMean", g.op("Pow", x, g.constant(2.0, TensorProto.FLOAT), name=f"{name}/Pow"), g.ints(-1), name=f"{name}/ReduceMean", keepdims=1)
        root = g.op("Sqrt", g.op("Add", square, g.constant(spec.norm_eps, TensorProto.FLOAT), name=f"{name}/Add"), name=f"{name}/Sqrt")
        weight = self._linears.vector(f"{module}.weight", spec.norm_offset, torch.float32)
        y = g.op("Mul", g.op("Div", x, root, name=f"{name}/Div"), weight, name=f"{name}/Mul")
        return g.op("Cast", y, name=f"{name}/Narrow", to=self._kind) if half else y

    def attention(self, q: str, k: str, v: str, layer: int, name: str) -> str:
        """See `Parts.attention`. Query heads that share keys stand below each other, so that keys are never repeated."""
        g, spec = self._graph, self._spec
        heads, kv, size, at = spec.num_heads, spec.num_kv_heads, spec.head_dim, f"{name}/attention"
        q, k = (self._heads(x, n, layer, part, name) for x, n, part in ((q, heads, "q"), (k, kv, "k")))
        v = g.op("Transpose", g.op("Reshape", v, g.ints(0, 0, kv, size), name=f"{name}/v/Reshape"), name=f"{name}/v/Transpose", perm=[0, 2, 1, 3])
        k, v = (g.op("Concat", PAST % (layer, part), x, name=f"{name}/{part}/Concat", out=(PRESENT % (layer, part),), axis=2) for x, part in ((k, "key"), (v, "value")))
        q = g.op("Mul", q, g.constant(amplitudes(spec, layer)[0], self._kind), name=f"{at}/Scale")
        keys = g.op("Transpose", k, name=f"{at}/Transpose", perm=[0, 1, 3, 2])
        scores = g.op("MatMul", self._split(q, kv, size, f"{at}/Fold"), keys, name=f"{at}/Scores")
        scores = g.op("Add", self._split(scores, heads, None, f"{at}/Unfold"), self._mask(spec.layer_windows[layer]), name=f"{at}/Mask")
        shares = g.op("Softmax", scores, name=f"{at}/Softmax", axis=-1)
        y = g.op("MatMul", self._split(shares, kv, None, f"{at}/FoldShares"), v, name=f"{at}/MatMul")
        y = g.op("Transpose", self._split(y, heads, size, f"{at}/UnfoldResult"), name=f"{at}/Back", perm=[0, 2, 1, 3])
        return g.op("Reshape", y, g.ints(0, 0, heads * size), name=f"{at}/Join")

    def _split(self, x: str, heads: int, size: int | None, name: str) -> str:
        """`[B, any heads, any rows, size]` -> the same values as `[B, heads, rows, size]`; size None: T."""
        if self._spec.num_heads == self._spec.num_kv_heads:
            return x
        g = self._graph
        shape = g.ints(0, heads, -1, size) if size is not None else self._wide_shape(heads)
        return g.op("Reshape", x, shape, name=name)

    def _wide_shape(self, heads: int) -> str:
        """The vector (0, heads, -1, T)."""
        if heads not in self._shapes:
            self._shapes[heads] = self._graph.op("Concat", self._graph.ints(0, heads, -1), self._width, name=f"/model/shapes/{heads}", axis=0)
        return self._shapes[heads]

    def _heads(self, x: str, heads: int, layer: int, part: str, name: str) -> str:
        """`[B, S, heads D]` -> normed where the family does that, rotated, `[B, heads, S, D]`."""
        g, spec, at = self._graph, self._spec, f"{name}/{part}"
        shape = g.ints(0, 0, heads, spec.head_dim)
        x = x if spec.whole_qk_norm else g.op("Reshape", x, shape, name=f"{at}/Reshape")
        if spec.qk_norm:
            x = self.norm(x, f"model.layers.{layer}.self_attn.{part}_norm", f"{at}_norm")
        x = g.op("Reshape", x, shape, name=f"{at}/Reshape") if spec.whole_qk_norm else x
        x = g.op("Transpose", x, name=f"{at}/Transpose", perm=[0, 2, 1, 3])
        cos, sin = self._rotation(spec.layer_ropes[layer], amplitudes(spec, layer)[1])
        *halves, still = self._turning(x, spec.layer_ropes[layer], f"{at}/Split")
        products = [g.op("Mul", halves[i], (cos, sin)[j], name=f"{at}/Rotate/{i}{j}") for i, j in ((0, 0), (1, 1), (1, 0), (0, 1))]
        first = g.op("Sub", *products[:2], name=f"{at}/Rotate/first")
        second = g.op("Add", *products[2:], name=f"{at}/Rotate/second")
        return g.op("Concat", first, second, *still, name=f"{at}/Rotate", axis=-1)

    def _turning(self, x: str, rope: RopeSpec, at: str) -> tuple[str, str, tuple[str, ...]]:
        """Of heads `[B, heads, S, D]`: one and the other dimension of all pairs that turn, and the dimensions that do not, if there are any. Neighbours stay apart afterwards, in
        queries as in keys."""
        g, size = self._graph, self._spec.head_dim
        turned = rope.turned(size)
        still = (f"{at}/still",) if turned < size else ()
        if not rope.interleaved:
            first, second = f"{at}/first", f"{at}/second"
            g.op("Split", x, g.ints(turned // 2, turned // 2, *(size - turned for _ in still)), name=at, out=(first, second, *still), axis=-1)
            return first, second, still
        axis, step = g.ints(3), g.ints(2)
        first, second = (g.op("Slice", x, g.ints(i), g.ints(turned), axis, step, name=f"{at}/{part}") for i, part in enumerate(("first", "second")))
        return first, second, tuple(g.op("Slice", x, g.ints(turned), g.ints(size), axis, name=name) for name in still)

    def _rotation(self, rope: RopeSpec, amplitude: float) -> tuple[str, str]:
        """Cosines and sines `[B, 1, S, D / 2]` of the new positions, of as many dimensions as are rotated, times their amplitude, once for each kind of rotation."""
        if rope not in self._ropes:
            g, at = self._graph, f"/model/rope/{len(self._ropes)}"
            positions = g.op("Unsqueeze", g.op("Cast", "position_ids", name=f"{at}/Cast", to=TensorProto.FLOAT), g.ints(1, 3), name=f"{at}/Unsqueeze")
            frequencies = g.weight(f"model.rope.{len(self._ropes)}.inverse_frequencies", inverse_frequencies(rope, rope.turned(self._spec.head_dim)))
            angles = g.op("Mul", positions, frequencies, name=f"{at}/Mul")
            both = [g.op(kind, angles, name=f"{at}/{kind}") for kind in ("Cos", "Sin")]
            if amplitude != 1.0:
                both = [g.op("Mul", x, g.constant(amplitude, TensorProto.FLOAT), name=f"{x}/Mul") for x in both]
            narrow = [x if self._compute is torch.float32 else g.op("Cast", x, name=f"{x}/Cast", to=self._kind) for x in both]
            self._ropes[rope] = narrow[0], narrow[1]
        return self._ropes[rope]

    def _mask(self, window: int) -> str:
        """`[B, 1, S, T]`: 0 where a token may be seen (it exists, does not come later, and lies within the window), once for each window."""
        if window not in self._masks:
            g, at = self._graph, f"/model/mask/{window}"
            seen = g.op("LessOrEqual", self._columns, self._rows, name=f"{at}/LessOrEqual")
            if window:
                first = g.op("Sub", self._rows, g.constant(window, TensorProto.INT64), name=f"{at}/first")
                seen = g.op("And", seen, g.op("Greater", self._columns, first, name=f"{at}/Greater"), name=f"{at}/within")
            seen = g.op("And", seen, self._there, name=f"{at}/And")
            low = g.constant(_MASKED[self._compute], self._kind)
            self._masks[window] = g.op("Where", seen, g.constant(0.0, self._kind), low, name=f"{at}/Where")
        return self._masks[window]
