"""A process's share of a weight, where several processes compute a model together (Megatron-LM, arXiv 1909.08053, section 3).

Queries, keys, values, gate, up and the head are shared by outputs; what follows them, the attention's output and down, by inputs, so that their products are parts of a sum.
Letters: O outputs, I inputs, N processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from qforge.errors import UnsupportedError
from qforge.runtime.linears import Dense, Weight, rows
from qforge.scheme import Per
from qforge.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """Which of N equal parts."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """The part of `count` things, which N divides."""
        assert count % self.size == 0
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def of_spec(spec: ModelSpec, share: Share) -> ModelSpec:
    """The model that one process sees.

    Raises:
        UnsupportedError: its heads or its MLP do not divide, it has experts, or norms over all heads.
    """
    if spec.experts is not None:
        raise UnsupportedError("a mixture of experts is not shared by several processes yet; use tensor_parallel: 1")
    if spec.whole_qk_norm:
        raise UnsupportedError("queries and keys that are normed over all heads at once are not shared by several processes yet; use tensor_parallel: 1")
    for name, count in (("attention heads", spec.num_heads), ("key/value heads", spec.num_kv_heads), ("columns of its MLP", spec.intermediate_size)):
        if count % share.size:
            fitting = [n for n in range(1, 9) if all(c % n == 0 for c in (spec.num_heads, spec.num_kv_heads, spec.intermediate_size))]
            raise UnsupportedError(f"{share.size} processes cannot share {count} {name}; this model can be shared by {', '.join(map(str, fitting))}")
    return replace(spec, num_heads=spec.num_heads // share.size, num_kv_heads=spec.num_kv_heads // share.size, intermediate_size=spec.intermediate_size // share.size)


def of_outputs(weight: Weight, share: Share, name: str) -> Weight:
    """`[O / N, I]`, with its part of the bias.

    Raises:
        UnsupportedError: scales cover blocks of outputs that would be cut.
    """
    if isinstance(weight, Dense):
        part = share.of(len(weight.weight))
        return Dense(weight.weight[part], None if weight.bias is None else weight.bias[part])
    part, grain = share.of(weight.out_features), weight.scheme.granularity
    if grain.per is Per.BLOCK:
        _whole_blocks(weight.out_features, grain.rows, "outputs", share, name)
    cut = slice(None) if grain.per is Per.TENSOR else share.of(weight.scales.shape[0])
    return replace(
        weight, codes=weight.codes[part].contiguous(), scales=weight.scales[cut].contiguous(), zeros=None if weight.zeros is None else weight.zeros[cut].contiguous(),
        super_scales=None, bias=None if weight.bias is None else weight.bias[part],
    )  # fmt: skip


def of_parts(weight: Weight, share: Share, sizes: Sequence[int]) -> Weight:
    """`[O / N, I]` of a weight that holds several below each other, of so many outputs: its part of each."""
    starts = accumulate(sizes[:-1], initial=0)
    cuts = ((start, share.of(size)) for start, size in zip(starts, sizes, strict=True))
    return rows(weight, torch.cat([torch.arange(start + cut.start, start + cut.stop) for start, cut in cuts]))


def of_inputs(weight: Weight, share: Share, name: str) -> Weight:
    """`[O, I / N]`; the first process adds the bias.

    Raises:
        UnsupportedError: groups of inputs that share a scale would be cut, or are not neighbours.
    """
    bias = weight.bias if share.rank == 0 else None
    if isinstance(weight, Dense):
        return Dense(weight.weight[:, share.of(weight.weight.shape[1])].contiguous(), bias)
    if weight.group_index is not None:
        raise UnsupportedError(f"{share.size} processes cannot share {name}: its groups are not neighbouring inputs (act order); quantize it without")
    inputs, rounding = weight.in_features, weight.scheme.activations
    cut, columns = slice(None), weight.scheme.granularity.columns
    if weight.scheme.granularity.per in (Per.GROUP, Per.BLOCK):
        _whole_blocks(inputs, columns, "inputs", share, name)
        cut = share.of(weight.scales.shape[1])
    if rounding is not None and rounding.granularity.per is Per.GROUP:
        _whole_blocks(inputs, rounding.granularity.columns, "inputs", share, name)
    return replace(
        weight, codes=weight.codes[:, share.of(inputs)].contiguous(), scales=weight.scales[:, cut].contiguous(),
        zeros=None if weight.zeros is None else weight.zeros[:, cut].contiguous(), super_scales=None, bias=bias,
    )  # fmt: skip


def _whole_blocks(count: int, block: int, of: str, share: Share, name: str) -> None:
    if count % (share.size * block):
        raise UnsupportedError(
            f"{share.size} processes cannot share {name}: {count} {of} in groups of {block} do not divide into {share.size} equal parts; use fewer processes, or smaller groups"
        )
