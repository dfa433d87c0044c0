"""What the GPU's kernels compute, in plain PyTorch and fp32: for tensors on a CPU, where neither a GPU nor Triton's interpreter runs them.

Letters: M rows, N outputs, K inputs, G groups; T queries, H query heads, C cache heads, D head size, B pages, S sequences.
"""

from __future__ import annotations

import torch

from qforge.numerics import activation_scale
from qforge.ops.triton.cache import LIMITS, PagedCache
from qforge.ops.triton.products import RoundedRows
from qforge.ops.triton.w4_pack import SYMMETRIC_ZERO, W4, unpack_words
from qforge.ops.triton.w8_pack import W8
from qforge.scheme import Number

_NUMBERS = {torch.int8: Number.INT8, torch.float8_e4m3fn: Number.FP8_E4M3}


def rounded(x: torch.Tensor, dtype: torch.dtype, span: int) -> RoundedRows:
    """Rows `[M, K]` in 8 bits, one scale for each `span` inputs."""
    columns = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -columns % span)).unflatten(1, (-1, span))
    scales = activation_scale(groups.abs().amax(-1), _NUMBERS[dtype])
    scaled = groups / scales[..., None]
    codes = scaled.round().clamp(-128, 127) if dtype == torch.int8 else scaled.clamp(-LIMITS[dtype], LIMITS[dtype])
    return RoundedRows(codes.flatten(1)[:, :columns].to(dtype).contiguous(), scales)


def w4_linear(x: torch.Tensor, w: W4) -> torch.Tensor:
    """See `products.w4_linear`."""
    codes = unpack_words(w.words)[:, : w.in_features].float()
    group = torch.arange(w.in_features, device=x.device) // w.group
    zeros = SYMMETRIC_ZERO if w.zeros is None else w.zeros[group].T.float()
    weight = (codes - zeros) * w.scales[group].T.float()
    y = (x if w.order is None else x[:, w.order]).float() @ weight.T
    return (y if w.bias is None else y + w.bias).to(x.dtype)


def w8_linear(x: torch.Tensor, w: W8) -> torch.Tensor:
    """See `products.w8_linear`, for activations that are not rounded yet."""
    span = w.input_group or w.in_features
    r = rounded(x, w.codes.dtype, span)
    inputs = torch.arange(w.in_features, device=x.device)
    y = (r.codes.float() * r.scales[:, inputs // span]) @ (w.codes.float() * w.scales[inputs // w.group].T).T
    return (y if w.bias is None else y + w.bias).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `between.rms_norm`, without a residual."""
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon) * weight.float()).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `between.silu_mul`."""
    gate, up = gate_up.float().chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotate_and_store(
    qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, heads: int, cache: PagedCache,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `cache.rotate_and_store`."""
    size = cache.keys.shape[3]
    q, k, v = qkv.float().view(len(qkv), -1, size).split([heads, cache.heads, cache.heads], 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    cos, sin = (t[positions.long()].unsqueeze(1) for t in (cosines, sines))
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    kept = slots >= 0
    for values, into, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
        new = values[kept]
        if scales is None:
            into.view(-1, *into.shape[2:])[slots[kept]] = new.to(into.dtype)
        else:
            r = rounded(new.flatten(0, 1), into.dtype, size)
            into.view(torch.uint8).view(-1, *into.shape[2:])[slots[kept]] = r.codes.view(torch.uint8).view(new.shape)
            scales.view(-1, cache.heads)[slots[kept]] = r.scales.view(new.shape[:2])
    return q.to(qkv.dtype)


def attention(q: torch.Tensor, cache: PagedCache, tables: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """See `cache.attention`."""
    out, first = torch.empty_like(q), starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        pages = tables[s, : -(-length // cache.page)].long()
        k, v = (_read(codes, scales, pages)[:length] for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)))
        query = q[first[s] : first[s + 1]].float()
        place = torch.arange(length - len(query), length, device=q.device)[:, None]
        token = torch.arange(length, device=q.device)
        seen = (token <= place) & (token > place - window if window else token >= 0)
        query, k, v = (t.transpose(0, 1)[None] for t in (query, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        out[first[s] : first[s + 1]] = mixed[0].transpose(0, 1).to(q.dtype)
    return out


def _read(codes: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    values = codes[pages].float()
    return (values if scales is None else values * scales[pages][..., None]).flatten(0, 1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
