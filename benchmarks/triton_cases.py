"""What each GPU kernel must compute, against fp64: for Triton's interpreter (tiny shapes, CPU) and for a GPU (odd shapes).

A case returns (error, tolerance), both relative to the largest value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qforge import numerics
from qforge.ops.cuda import w4
from qforge.ops.triton.between import rms_norm, silu_mul
from qforge.ops.triton.cache import PagedCache, attention, empty_cache, rotate_and_store
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.ops.triton.products import RoundedRows, round_activations, w4_linear
from qforge.ops.triton.sampling import CHUNK, SamplingRows, most_likely, sample
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.w4_pack import pack_w4
from qforge.ops.triton.w8_pack import pack_w8
from qforge.qlinear import QuantizedLinear
from qforge.runtime import sampler
from qforge.runtime.sequence import SamplingParams
from qforge.scheme import parse

EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
Case = Callable[[], tuple[float, float]]


def quantized(text: str, shape: tuple[int, int], seed: int = 0, bias: bool = False, shuffled: bool = False) -> QuantizedLinear:
    g = torch.Generator().manual_seed(seed)
    scheme = parse(text)
    weight = torch.randn(shape, generator=g) * 0.05 + 0.01
    index = None
    if shuffled:
        n = scheme.granularity.columns
        index = (torch.randperm(shape[1], generator=g) // n).int()
        by_group = torch.argsort(index, stable=True)
        scales, zeros = numerics.minmax_parameters(weight[:, by_group], scheme)
    else:
        scales, zeros = numerics.minmax_parameters(weight, scheme)
    return numerics.quantize(weight, scheme, scales, zeros, group_index=index, bias=torch.randn(shape[0], generator=g) if bias else None)


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double().cpu() - want).abs().max() / want.abs().max())


def product64(x: torch.Tensor, q: QuantizedLinear) -> torch.Tensor:
    y = numerics.quantize_activations(x, q.scheme).double() @ numerics.dequantize(q).double().T
    return y if q.bias is None else y + q.bias.double()


def linear_case(text: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, tile: Tile | None = None, **how: bool) -> tuple[float, float]:
    q = quantized(text, shape, **how)
    x = (torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)) + 0.1).to(dtype)
    x[-1, 3] = -6  # the largest magnitude of a row is negative
    kernel = TritonW4() if q.scheme.activations is None else TritonW8()
    assert kernel.supports(q.scheme, shape, device) is None
    packed = kernel.prepack(q.to(device))
    y = kernel.run(x.to(device), packed) if tile is None else w4_linear(x.to(device), packed, tile)
    again = kernel.run(x.to(device), packed) if tile is None else w4_linear(x.to(device), packed, tile)
    assert torch.equal(y, again), "the same product gave other bits"  # parts are added in one order, and counters are left as they were
    assert y.dtype == dtype
    assert y.shape == (rows, shape[0])
    return error(y, product64(x, q)), 2 * EPS.get(dtype, EPS[torch.bfloat16])


def few_case(text: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, few: w4.Few) -> tuple[float, float]:
    """The kernel in CUDA C++ for a few rows, on a GPU."""
    return _cuda_case(text, rows, shape, dtype, device, lambda x, packed: w4.multiply_few(x, packed, few))


def many_case(text: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, plan: w4.Plan) -> tuple[float, float]:
    """The kernel in CUDA C++ for many rows, on a GPU."""
    return _cuda_case(text, rows, shape, dtype, device, lambda x, packed: w4.multiply_many(x, packed, plan))


def _cuda_case(text: str, rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, product: w4.Product) -> tuple[float, float]:
    q = quantized(text, shape, bias=True)
    x = (torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)) + 0.1).to(dtype)
    packed = pack_w4(q.to(device))
    y, again = product(x.to(device), packed), product(x.to(device), packed)
    assert torch.equal(y, again), "the same product gave other bits"
    return error(y, product64(x, q)), 2 * EPS[dtype]


def rounding_case(text: str, rows: int, columns: int, device: str) -> tuple[float, float]:
    """Rounded activations equal the reference's bit for bit."""
    q = quantized(text, (32, columns))
    x = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) * 3).half()
    x[0] = 0
    r = round_activations(x.to(device), pack_w8(q.to(device)))
    assert (r.scales > 0).all()
    values = r.codes.cpu().float() * r.scales.cpu().repeat_interleave(columns // r.scales.shape[1], 1)
    return float((values - numerics.quantize_activations(x, q.scheme)).abs().max()), 0.0


def attention_case(
    dtype: torch.dtype, device: str, *, stored: torch.dtype | None = None, heads: int = 4, cache_heads: int = 2, size: int = 32, page: int = 16,
    contexts: tuple[int, ...] = (1, 37, 70),
    queries: tuple[int, ...] = (1, 1, 1), window: int = 0, parts: int | None = None, tile: Tile | None = None, sharp: float = 1.0,
) -> tuple[float, float]:  # fmt: skip
    g = torch.Generator().manual_seed(3)
    pages = [-(-n // page) for n in contexts]
    order = torch.randperm(sum(pages) + 2, generator=g)
    tables, taken = torch.zeros(len(contexts), max(pages), dtype=torch.int32), 0
    for s, n in enumerate(pages):
        tables[s, :n], taken = order[taken : taken + n].int(), taken + n
    shape = (len(order), page, cache_heads, size)
    keys, values = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    cache, keys, values = _stored(keys, values, stored or dtype, device)
    q = (torch.randn(sum(queries), heads, size, generator=g) * sharp).to(dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    y = attention(
        q.to(device), cache, tables.to(device), starts.to(device), torch.tensor(contexts, dtype=torch.int32, device=device),
        longest=max(queries), longest_context=max(contexts), scale=size**-0.5, window=window, parts=parts, tile=tile,
    )  # fmt: skip
    want = torch.cat([
        _dense(q[starts[s] : starts[s + 1]].double(), keys[tables[s].long()].flatten(0, 1)[:n], values[tables[s].long()].flatten(0, 1)[:n], window) for s, n in enumerate(contexts)
    ])  # fmt: skip
    return error(y, want), 4 * EPS[dtype]


def _stored(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, device: str) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """(cache, the keys and the values that it stands for in fp64)"""
    if dtype in EPS:
        cache = PagedCache(keys.to(device, dtype), values.to(device, dtype))
        return cache, cache.keys.double().cpu(), cache.values.double().cpu()
    scales = [t.abs().amax(-1) / (127 if dtype == torch.int8 else 448) for t in (keys, values)]
    codes = [(t / s[..., None]).round().to(dtype) if dtype == torch.int8 else (t / s[..., None]).to(dtype) for t, s in zip((keys, values), scales, strict=True)]
    meant = [c.double() * s[..., None].double() for c, s in zip(codes, scales, strict=True)]
    return PagedCache(codes[0].to(device), codes[1].to(device), scales[0].to(device), scales[1].to(device)), meant[0], meant[1]


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    place = torch.arange(len(k) - len(q), len(k))[:, None]
    p = torch.arange(len(k))[None]
    seen = (p <= place) & ((p > place - window) if window else True)
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


def rope_case(
    dtype: torch.dtype, device: str, stored: torch.dtype | None = None, size: int = 24, norms: bool = False, calibrated: tuple[float, float] | None = None
) -> tuple[float, float]:  # fmt: skip
    g = torch.Generator().manual_seed(1)
    tokens, heads, c, page = 5, 4, 2, 4
    qkv = torch.randn(tokens, (heads + 2 * c) * size, generator=g).to(dtype)
    positions, slots = torch.tensor([3, 0, 7, 1, 2], dtype=torch.int32), torch.tensor([9, 0, -1, 4, 11])
    angles = torch.arange(8.0)[:, None] * 10000 ** (-torch.arange(size // 2) / (size // 2))
    cache = empty_cache(3, page, c, size, stored or dtype, device, calibrated)
    weights = [(torch.rand(size, generator=g) + 0.5).to(dtype) for _ in range(2)]
    q = rotate_and_store(
        qkv.to(device),
        angles.cos().to(device),
        angles.sin().to(device),
        positions.to(device),
        slots.to(device),
        heads,
        cache,
        (*(n.to(device) for n in weights), 1e-3) if norms else None,
    )
    x = qkv.double().view(tokens, heads + 2 * c, size)
    if norms:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        x = torch.cat((normed[:, :heads] * weights[0].double(), normed[:, heads:-c] * weights[1].double(), x[:, -c:]), 1)
    angle = angles[positions.long()].double()[:, None]
    low, high = x[..., : size // 2], x[..., size // 2 :]
    turned = torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)
    kept = slots >= 0
    got_k, got_v = (
        t.flatten(0, 1).double().cpu()[slots[kept]] * (1 if s is None else s.flatten(0, 1).double().cpu()[slots[kept]][..., None])
        for t, s in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    )
    for scales, scale in zip((cache.key_scales, cache.value_scales), calibrated or (), strict=False):
        assert (scales == scale).all()
    untouched = torch.ones(3 * page, dtype=torch.bool).index_fill(0, slots[kept], False)
    assert not cache.keys.flatten(0, 1).float().cpu()[untouched].any()
    step = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4}.get(stored or dtype, 0.0)
    tolerance = max(2 * EPS[dtype], step) + 1e-6
    return max(error(q, turned[:, :heads]) * tolerance / (2 * EPS[dtype]), error(got_k, turned[kept, heads:-c]), error(got_v, x[kept, -c:])), tolerance


def norm_case(dtype: torch.dtype, device: str, add: bool = False, rounded: torch.dtype | None = None, columns: int = 80) -> tuple[float, float]:
    g = torch.Generator().manual_seed(2)
    sizes = torch.tensor([[1.0], [0.01], [0.003]])  # in the last rows epsilon counts
    x, residual = ((torch.randn(3, columns, generator=g) * sizes).to(dtype) for _ in range(2))
    weight = torch.rand(columns, generator=g).to(dtype)
    carried = residual.clone().to(device)
    y = rms_norm(x.to(device), weight.to(device), 1e-5, carried if add else None, rounded)
    assert error(carried, (x.double() + residual.double()) if add else residual.double()) <= (2 * EPS[dtype] if add else 0)  # the interpreter cuts bf16 off
    value = (carried if add else x).double().cpu()
    want = value * (value.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    if isinstance(y, RoundedRows):
        return error(y.codes.double().cpu() * y.scales.double().cpu(), want), {torch.int8: 0.51 / 127, torch.float8_e4m3fn: 2.0**-4}[y.codes.dtype]
    return error(y, want), 2 * EPS[dtype]


def silu_case(dtype: torch.dtype, device: str, columns: int = 50) -> tuple[float, float]:
    x = torch.randn(3, 2 * columns, generator=torch.Generator().manual_seed(4)).to(dtype)
    gate, up = x.double().chunk(2, 1)
    return error(silu_mul(x.to(device)), gate * gate.sigmoid() * up), 2 * EPS[dtype]


def sampling_case(vocabulary: int, device: str, chunk: int = CHUNK, seed: int = 0, ties: bool = False, draws: int = 1) -> tuple[float, float]:
    """How many rows of a mixed batch choose another token than the runtime's sampler, over every filter alone and together.

    At high temperatures the kept tokens are about as likely as each other, and filters' numbers are drawn from the upper end, so that one token too many or too few is seen.
    """
    g = torch.Generator().manual_seed(seed)
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (40.0, 3, 1.0, 0.0), (40.0, 0, 0.1, 0.0), (9.0, 0, 1.0, 0.6), (1.5, 40, 0.9, 0.02), (40.0, 1, 1.0, 0.0)]
    kinds = [*kinds, (2.0, vocabulary + 1, 1e-9, 0.0)] * draws
    logits = torch.randn(len(kinds), vocabulary, generator=g) * 3
    logits = logits.round() if ties else logits
    logits[:, ::7] = -torch.inf
    places = [_place(g, i, seed, 0.97 if top_k or top_p < 1 or min_p else 0.0) for i, (_, top_k, top_p, min_p) in enumerate(kinds)]
    got = sample(logits.to(device), SamplingRows.of([(*k, *p) for k, p in zip(kinds, places, strict=True)], device), chunk).cpu()
    params = [SamplingParams(temperature=t or 1.0, top_k=k if t else 1, top_p=p, min_p=m) for t, k, p, m in kinds]
    want = torch.tensor([sampler.draw(row, how, s, at) for row, how, (s, at) in zip(logits, params, places, strict=True)])
    first = torch.tensor([sampler.draw(row, SamplingParams(temperature=1.0, top_k=1), 0, 0) for row in logits])
    return float((got != want).sum() + (most_likely(logits.to(device)).cpu() != first).sum()), 0.0


def not_finite_case(vocabulary: int, device: str, chunk: int = CHUNK) -> tuple[float, float]:
    """How many rows whose largest logit is not finite get a token, and how many others get none, or another than the runtime's sampler gives."""
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(9)) * 3
    logits[0, vocabulary // 2] = torch.nan
    logits[1, -1] = torch.inf
    logits[2] = -torch.inf
    logits[3, 3] = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32)  # a NaN whose sign is set
    logits[4, ::2] = -torch.inf
    wrong = 0
    for temperature in (0.0, 1.0):
        kinds = [(temperature, 0, 1.0, 0.0, 1, row) for row in range(len(logits))]
        draws = [sampler.Draw(SamplingParams(temperature=temperature), 1, row) for row in range(len(logits))]
        want = torch.tensor(sampler.sample(logits, draws))
        assert want[:4].tolist() == [-1] * 4
        wrong += int((sample(logits.to(device), SamplingRows.of(kinds, device), chunk).cpu() != want).sum())
        wrong += int((most_likely(logits.to(device)).cpu() != want).sum()) if temperature == 0 else 0
    return wrong, 0.0


def _place(g: torch.Generator, i: int, seed: int, least: float) -> tuple[int, int]:
    """A seed and a position whose random number is at least so large."""
    while True:
        place = int(torch.randint(0, 1 << 62, (), generator=g)) + (i % 2 << 63), i * 1000 + seed
        if sampler.uniform(*place) >= least:
            return place


def compiled_case(text: str, device: str) -> tuple[float, float]:
    """A product under torch.compile, traced as one graph."""
    q = quantized(text, (130, 256), bias=True)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).half()
    kernel = TritonW4() if q.scheme.activations is None else TritonW8()
    packed = kernel.prepack(q.to(device))
    product = torch.compile(lambda a: kernel.run(a, packed) * 2, fullgraph=True, backend="aot_eager")
    return error(product(x.to(device)), 2 * product64(x, q)), 2 * EPS[torch.float16]
