"""The GPU's kernels as operations of torch, so that torch.compile traces through them: `torch.ops.qforge.*`.

Run eagerly, kernels are called as functions instead: the dispatch of an operation costs 40 us of the host. On a CPU without Triton's interpreter the operations run `plain`.
"""

from __future__ import annotations

import torch
from torch.library import custom_op

from qforge.ops.triton import between, cache, plain, products
from qforge.ops.triton.cache import PagedCache
from qforge.ops.triton.present import interpreted
from qforge.ops.triton.w4_pack import W4
from qforge.ops.triton.w8_pack import W8


def _runs_plainly(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and not interpreted()


@custom_op("qforge::w4_linear", mutates_args=("turns",))
def _w4(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None, bias: torch.Tensor | None, in_features: int, group: int,
    turns: torch.Tensor, either: bool,
) -> torch.Tensor:  # fmt: skip
    w = W4(words, scales, zeros, order, bias, in_features, group, turns, either)
    return plain.w4_linear(x, w) if _runs_plainly(x) else products.w4_linear(x, w)


@_w4.register_fake
def _(x: torch.Tensor, words: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], words.shape[1]))


@custom_op("qforge::w8_linear", mutates_args=("turns",))
def _w8(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, group: int, input_group: int, limit: float, turns: torch.Tensor) -> torch.Tensor:
    w = W8(codes, scales, bias, group, input_group, limit, turns)
    return plain.w8_linear(x, w) if _runs_plainly(x) else products.w8_linear(x, w)


@_w8.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


@custom_op("qforge::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if _runs_plainly(x):
        return plain.rms_norm(x, weight, epsilon)
    y = between.rms_norm(x, weight, epsilon)
    assert isinstance(y, torch.Tensor)
    return y


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("qforge::add_rms_norm", mutates_args=("residual",))
def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if _runs_plainly(x):
        return plain.rms_norm(residual.copy_(x.float() + residual.float()), weight, epsilon)
    y = between.rms_norm(x, weight, epsilon, residual)
    assert isinstance(y, torch.Tensor)
    return y


@_add_rms_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("qforge::silu_mul", mutates_args=())
def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return plain.silu_mul(gate_up) if _runs_plainly(gate_up) else between.silu_mul(gate_up)


@_silu_mul.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@custom_op("qforge::rotate_and_store", mutates_args=("keys", "values", "key_scales", "value_scales"))
def _rotate_and_store(
    qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, heads: int,
    keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, epsilon: float,
) -> torch.Tensor:  # fmt: skip
    norms = None if q_norm is None or k_norm is None else (q_norm, k_norm, epsilon)
    run = plain.rotate_and_store if _runs_plainly(qkv) else cache.rotate_and_store
    return run(qkv, cosines, sines, positions, slots, heads, PagedCache(keys, values, key_scales, value_scales), norms)


@_rotate_and_store.register_fake
def _(
    qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, heads: int,
    keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, epsilon: float,
) -> torch.Tensor:  # fmt: skip
    return qkv.new_empty((qkv.shape[0], heads, keys.shape[3]))


@custom_op("qforge::paged_attention", mutates_args=())
def _attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
    tables: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, longest: int, longest_context: int, scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    paged = PagedCache(keys, values, key_scales, value_scales)
    if _runs_plainly(q):
        return plain.attention(q, paged, tables, starts, lengths, scale, window)
    return cache.attention(q, paged, tables, starts, lengths, longest=longest, longest_context=longest_context, scale=scale, window=window)


@_attention.register_fake
def _(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
    tables: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, longest: int, longest_context: int, scale: float, window: int,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(q)


def w4_linear(x: torch.Tensor, w: W4) -> torch.Tensor:
    """`products.w4_linear` as one node of a graph."""
    y: torch.Tensor = _w4(x, w.words, w.scales, w.zeros, w.order, w.bias, w.in_features, w.group, w.turns, w.either)
    return y


def w8_linear(x: torch.Tensor, w: W8) -> torch.Tensor:
    """`products.w8_linear` as one node of a graph."""
    y: torch.Tensor = _w8(x, w.codes, w.scales, w.bias, w.group, w.input_group, w.limit, w.turns)
    return y
