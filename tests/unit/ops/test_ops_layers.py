"""Norm, gate and paged attention against fp64, and the native ones bit for bit between instruction sets."""

from __future__ import annotations

import math

import pytest
import torch
from native_layers import NativeLayers
from tolerances import LAYERS

from qforge.ops.layers import AttentionParameters, Batch, TorchLayers
from qforge.ops.native_cache import NativeCache, bytes_per_token
from qforge.ops.native_module import instruction_sets

OPS: list[TorchLayers | NativeLayers] = [TorchLayers(), *(NativeLayers(2, isa) for isa in instruction_sets())]
STORED = {"attention": OPS, **{f"attention {kind}": [NativeLayers(2, isa, kind) for isa in instruction_sets()] for kind in ("fp16", "bf16", "int8", "fp8")}}

ENDS = {  # what is stored, and what is read back
    "fp16": ([65519.0, -1e6, 6e-8, 0.0], [65504.0, -65504.0, 2.0**-24, 0.0]),
    "bf16": ([3.4e38, -3.4e38, 1.0 + 2**-8, 0.0], [2.0**128 - 2.0**120, 2.0**120 - 2.0**128, 1.0, 0.0]),
    "int8": ([1e30, -1e30, 1e27, 0.0], [1e30, -1e30, 0.0, 0.0]),
    "fp8": ([448e9, -448e9, 1e6, 0.0], [448e9, -448e9, 1953125.0, 0.0]),
}


def _near(y: torch.Tensor, wanted: torch.Tensor, operation: str) -> None:
    assert (y.double() - wanted).abs().max() <= LAYERS[operation] * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize("width", [1, 7, 16, 48, 576])
def test_norm(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(5, width, generator=g) * 3, torch.randn(width, generator=g)
    d = x.double()
    wanted = weight.double() * d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    results = [ops.norm(x, weight, 1e-5) for ops in OPS]
    for y in results:
        _near(y, wanted, "norm")
    assert all(torch.equal(results[1], y) for y in results[2:])


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [1, 8, 13, 172])
def test_gate(activation: str, width: int) -> None:
    x = torch.randn(6, 2 * width, generator=torch.Generator().manual_seed(width)) * 8
    a, b = x.double().chunk(2, -1)
    wanted = (torch.nn.functional.silu(a) if activation == "silu" else torch.nn.functional.gelu(a, approximate="tanh")) * b
    results = [ops.gate(x, activation) for ops in OPS]
    for y in results:
        _near(y, wanted, "gate")
    assert all(torch.equal(results[1], y) for y in results[2:])


@pytest.mark.parametrize("value", [-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])
def test_gate_at_the_ends_of_its_range(value: float) -> None:
    x = torch.tensor([[value, 1.0]])
    for ops in OPS:
        assert ops.gate(x, "silu").item() == pytest.approx(value if value > 20 else 0.0, abs=1e-30)


def _dense_attention(qkv: torch.Tensor, a: AttentionParameters, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One whole sequence in fp64, written from the definition."""
    heads = qkv.double().view(len(qkv), -1, a.head_dim)
    q, k, v = heads[:, : a.num_heads], heads[:, a.num_heads : -a.num_kv_heads], heads[:, -a.num_kv_heads :]
    if a.q_norm is not None and a.k_norm is not None:
        q, k = (t / (t.pow(2).mean(-1, keepdim=True) + a.norm_eps).sqrt() * w.double() for t, w in ((q, a.q_norm), (k, a.k_norm)))
    angle = torch.complex(rope[0].double(), rope[1].double())[: len(qkv), None]
    q, k = (torch.complex(*t.chunk(2, -1)) * angle for t in (q, k))
    q, k = (torch.cat((t.real, t.imag), -1) for t in (q, k))
    out = torch.zeros(len(qkv), a.num_heads, a.head_dim, dtype=torch.float64)
    for t in range(len(qkv)):
        first = max(0, t - a.window + 1) if a.window else 0
        for h in range(a.num_heads):
            g = h * a.num_kv_heads // a.num_heads
            p = torch.softmax(k[first : t + 1, g] @ q[t, h] * a.scale, 0)
            out[t, h] = p @ v[first : t + 1, g]
    return out.view(len(qkv), -1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "normed"),
    [(4, 2, 16, 0, False), (3, 1, 8, 0, True), (6, 6, 6, 5, False), (9, 3, 64, 20, True), (2, 2, 48, 1, False), (9, 3, 64, 0, True), (8, 1, 128, 0, False), (4, 2, 80, 65, True)],
)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("stored", STORED)
def test_attention_over_scattered_blocks(heads: int, kv_heads: int, head_dim: int, window: int, normed: bool, block_size: int, stored: str) -> None:
    g = torch.Generator().manual_seed(heads * head_dim)
    norms = [torch.rand(head_dim, generator=g) + 0.5 for _ in "qk"] if normed else [None, None]
    a = AttentionParameters(heads, kv_heads, head_dim, window, head_dim**-0.5, norms[0], norms[1], 1e-6)
    lengths = [150, 17]
    angles = torch.rand(160, head_dim // 2, generator=g) * 6
    rope = (angles.cos(), angles.sin())
    whole = [torch.randn(n, (heads + 2 * kv_heads) * head_dim, generator=g) for n in lengths]
    blocks = torch.randperm(2 * (160 // block_size), generator=g).view(2, -1).int()
    wanted = [_dense_attention(w, a, rope) for w in whole]
    results = []
    for ops in STORED[stored]:
        cache = ops.cache(len(blocks.flatten()), block_size, kv_heads, head_dim)
        outputs: list[list[torch.Tensor]] = [[], []]
        for pieces in ([(0, 0, 20)], [(0, 20, 50), (1, 0, 16)], [(1, 16, 17), (0, 50, 51)], [(0, 51, 100)], [(0, 100, 101)], [(0, 101, 150)]):
            positions = torch.cat([torch.arange(i, j) for _, i, j in pieces])
            tables = torch.stack([blocks[s] for s, _, _ in pieces])
            slots = torch.cat([blocks[s].long()[torch.arange(i, j) // block_size] * block_size + torch.arange(i, j) % block_size for s, i, j in pieces])
            starts = torch.tensor([0, *torch.tensor([j - i for _, i, j in pieces]).cumsum(0).tolist()], dtype=torch.int32)
            y = ops.attention(torch.cat([whole[s][i:j] for s, i, j in pieces]), a, cache, rope, Batch(positions, slots, tables, starts))
            for (s, _, _), i, j in zip(pieces, starts, starts[1:], strict=False):
                outputs[s].append(y[i:j])
        results.append(torch.cat([torch.cat(o) for o in outputs]))
        _near(results[-1], torch.cat(wanted), stored)
    natives = results[1:] if stored == "attention" else results
    assert all(torch.equal(natives[0], y) for y in natives)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(
    ("contexts", "queries", "firsts"),
    [
        ([int(n) for n in torch.arange(1, 171, 10)], [1] * 17, [0, 8]),  # tasks are sequences
        ([50, 16, 33], [1] * 3, [0, 1]),  # tasks are heads, the fourth of nine the second sequence's first
        ([100, *range(20, 140)], [100, *[1] * 120], [0, 6]),  # of 45 tasks the prompt's are 21, the others have five sequences each
        ([400, 30], [400, 1], [0, 0]),  # the second thread begins within the prompt
    ],
)
def test_what_the_next_attention_reads_is_brought_by_the_thread_that_will_read_it(window: int, contexts: list[int], queries: list[int], firsts: list[int]) -> None:
    """Blocks that the only query of a sequence sees, and nothing for prompts; fetching changes no result, so the addresses are looked at."""
    a, total = AttentionParameters(9, 3, 64, window, 1.0), sum(-(-n // 16) for n in contexts)
    cache = NativeCache("int8", total, 16, 3, 64, [None, None])
    each = 16 * bytes_per_token("int8", 3, 64)
    blocks = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    tables, held = torch.zeros(len(contexts), 25, dtype=torch.int32), [0, *torch.tensor([-(-n // 16) for n in contexts]).cumsum(0).tolist()]
    for row, i, j in zip(tables, held, held[1:], strict=False):
        row[: j - i] = blocks[i:j]
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(contexts, queries, strict=True)])
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    wanted = []
    for row, n, q in zip(tables.tolist(), contexts, queries, strict=True):
        seen = row[max(0, n - window if window else 0) // 16 : -(-n // 16)] if q == 1 else []
        wanted.append([(2 * block + 1) * each + line for block in seen for line in range(0, each, 64)])
    shares = zip(firsts, [*firsts[1:], len(contexts)], strict=True)
    lines = NativeLayers(2, "portable", "int8").lines_ahead(a, cache, 1, Batch(positions, positions, tables, starts))
    assert lines == [[line for lines in wanted[i:j] for line in lines] for i, j in shares]


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "fp8"])
def test_keys_and_values_at_the_ends_of_their_range_are_kept(kind: str) -> None:
    for isa in instruction_sets():
        ops = NativeLayers(1, isa, kind)
        a = AttentionParameters(1, 1, 4, 0, 1e-6)
        value, wanted = map(torch.tensor, ENDS[kind])
        cache = ops.cache(1, 16, 1, 4)
        one = torch.tensor([0])
        batch = Batch(one, one, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
        y = ops.attention(torch.cat([torch.zeros(8), value]).view(1, -1), a, cache, (torch.ones(1, 2), torch.zeros(1, 2)), batch)[0]
        torch.testing.assert_close(y, wanted, rtol=1e-6, atol=0)


WIDTHS = [4, 64]  # of a head: by the dot products of vectors, and by AMX's tiles


def _one_query(ops: NativeLayers, key: float, value: float, query: float, positions: int, wide: int = 4) -> torch.Tensor:
    """What the last of `positions` equal tokens (one head, not rotated) attends to."""
    a = AttentionParameters(1, 1, wide, 0, 1.0, None, None, 1e-6)
    blocks = -(-positions // 16)
    cache, places = ops.cache(blocks, 16, 1, wide), torch.arange(positions)
    batch = Batch(places, places, torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([0, positions], dtype=torch.int32))
    row = torch.tensor([query] * wide + [key] * wide + [value] * wide)
    return ops.attention(row.repeat(positions, 1), a, cache, (torch.ones(positions, wide // 2), torch.zeros(positions, wide // 2)), batch)[-1]


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("positions", [511, 512, 513, 1520])
@pytest.mark.parametrize("wide", WIDTHS)
def test_weights_that_are_all_alike_mix_to_the_value(kind: str, positions: int, wide: int) -> None:
    """Every weight is the largest of its 64 positions, and exact."""
    for isa in instruction_sets():
        y = _one_query(NativeLayers(1, isa, kind), 0.0, -3.0, 1.0, positions, wide)
        torch.testing.assert_close(y, torch.full((wide,), -3.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8", "fp8"])
def test_scores_of_any_size_are_told_apart_from_the_largest_exactly(kind: str) -> None:
    """Equal ones stay equal: scores of 2e11, times log2(e), are off by 2^13 where the largest is not taken off first."""
    for isa in instruction_sets():
        torch.testing.assert_close(_one_query(NativeLayers(1, isa, kind), 2e4, -3.0, 1.7e5, 40, 64), torch.full((64,), -3.0), rtol=1e-5, atol=0)


def test_outliers_in_keys_are_spread_in_int8() -> None:
    """Two dimensions of all keys are 30 times as large: of keys and queries that were rounded as they are, even with 16 bits for queries, .045 would be left."""
    a, length, g = AttentionParameters(3, 1, 64, 0, 64**-0.5), 160, torch.Generator().manual_seed(3)
    angles = torch.rand(length, 32, generator=g) * 6
    rope = (angles.cos(), angles.sin())
    x = torch.randn(length, 5 * 64, generator=g)
    x[:, [3 * 64 + 5, 3 * 64 + 20]] *= 30
    wanted, places = _dense_attention(x, a, rope), torch.arange(length)
    batch = Batch(places, places, torch.arange(10, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32))
    for ops in STORED["attention int8"]:
        y = ops.attention(x.clone(), a, ops.cache(10, 16, 1, 64), rope, batch)
        assert (y - wanted).norm() < 0.025 * wanted.norm()


def test_weights_beside_a_far_larger_one_are_kept_in_int8() -> None:
    """Position 0 takes all but 1 % of the weight, and 159 share the rest, 96 of them with values in other dimensions: a unit for the whole row would round their weights to 0."""
    a, length = AttentionParameters(1, 1, 64, 0, 1.0), 160
    x = torch.zeros(length, 3 * 64)
    x[:, 0] = 1
    x[0, 64] = 10
    x[0, 128] = 1
    x[64:, 129:] = 1
    places, rope = torch.arange(length), (torch.ones(length, 32), torch.zeros(length, 32))
    batch = Batch(places, places, torch.arange(10, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32))
    wanted = _dense_attention(x, a, rope)
    assert wanted[-1, 0] > 0.99
    for ops in STORED["attention int8"]:
        y = ops.attention(x.clone(), a, ops.cache(10, 16, 1, 64), rope, batch)
        torch.testing.assert_close(y[-1].double(), wanted[-1], rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("wide", WIDTHS)
def test_a_query_that_is_no_number_is_not_hidden(kind: str, wide: int) -> None:
    for isa in instruction_sets():
        assert _one_query(NativeLayers(1, isa, kind), 1.0, 1.0, math.nan, 20, wide).isnan().all()


@pytest.mark.parametrize("wide", WIDTHS)
def test_a_value_that_is_no_number_does_not_reach_rows_before_it(wide: int) -> None:
    """Of one step, where the whole tile is written before any row attends to it; in int8 the scale is no number."""
    a, length = AttentionParameters(3, 1, wide, 0, 0.4), 21
    x = torch.randn(length, 5 * wide, generator=torch.Generator().manual_seed(3))
    places, rope = torch.arange(length), (torch.ones(length, wide // 2), torch.zeros(length, wide // 2))
    batch = Batch(places, places, torch.arange(2, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32))
    for ops in STORED["attention int8"]:
        clean, spoilt = x.clone(), x.clone()
        spoilt[-1, -wide:] = math.nan
        good, bad = (ops.attention(t, a, ops.cache(2, 16, 1, wide), rope, batch) for t in (clean, spoilt))
        assert bad[-1].isnan().all()
        assert torch.equal(good[:-1], bad[:-1])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wide", WIDTHS)
def test_a_key_that_is_no_number_reaches_all_rows_that_see_it(stored: str, wide: int) -> None:
    """And none before it, wherever it lies among other scores of its lane."""
    a, length = AttentionParameters(3, 1, wide, 0, 0.4), 40
    x = torch.randn(length, 5 * wide, generator=torch.Generator().manual_seed(5))
    places, rope = torch.arange(length), (torch.ones(length, wide // 2), torch.zeros(length, wide // 2))
    batch = Batch(places, places, torch.arange(3, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32))
    for ops in STORED[stored][stored == "attention" :]:  # not PyTorch's reference
        clean, spoilt = x.clone(), x.clone()
        spoilt[3, 3 * wide : 4 * wide] = math.nan
        good, bad = (ops.attention(t, a, ops.cache(3, 16, 1, wide), rope, batch) for t in (clean, spoilt))
        assert bad[3:].isnan().all()
        assert torch.equal(good[:3], bad[:3])


@pytest.mark.parametrize("pieces", [[21], [1] * 21, [5, 1, 13, 2]])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wide", WIDTHS)
def test_what_another_sequence_left_in_a_block_is_not_read(stored: str, pieces: list[int], wide: int) -> None:
    a, length = AttentionParameters(3, 1, wide, 0, 0.4), 21
    x = torch.randn(length, 5 * wide, generator=torch.Generator().manual_seed(4))
    places, rope = torch.arange(48), (torch.ones(48, wide // 2), torch.zeros(48, wide // 2))
    tables = torch.arange(3, dtype=torch.int32)[None]
    for ops in STORED[stored]:
        results = []
        for left in (None, math.nan):
            cache = ops.cache(3, 16, 1, wide)
            if left is not None:
                ops.attention(torch.full((48, 5 * wide), left), a, cache, rope, Batch(places, places, tables, torch.tensor([0, 48], dtype=torch.int32)))
            done, rows = 0, []
            for n in pieces:
                here = places[done : done + n]
                rows.append(ops.attention(x[here].clone(), a, cache, rope, Batch(here, here, tables, torch.tensor([0, n], dtype=torch.int32))))
                done += n
            results.append(torch.cat(rows))
        assert torch.equal(*results)


@pytest.mark.parametrize("stored", STORED)
def test_the_sign_of_a_zero_does_not_depend_on_which_rows_go_together(stored: str) -> None:
    """Values are 0 where a row looks, and elsewhere so small that their products are zeros with a sign."""
    a, wide, length = AttentionParameters(1, 1, 16, 0, 1.0), 16, 20
    x = torch.zeros(length, 3, wide)
    x[:, 0, 0], x[0, 1, 0], x[1:, 2] = 5.0, 5.0, -1e-36
    places, rope, tables = torch.arange(length), (torch.ones(length, wide // 2), torch.zeros(length, wide // 2)), torch.arange(2, dtype=torch.int32)[None]
    for ops in STORED[stored][stored == "attention" :]:  # not PyTorch's reference
        signs = []
        for pieces in ([length], [1] * length):
            cache, done, rows = ops.cache(2, 16, 1, wide), 0, []
            for n in pieces:
                here = places[done : done + n]
                rows.append(ops.attention(x[here].flatten(1), a, cache, rope, Batch(here, here, tables, torch.tensor([0, n], dtype=torch.int32))))
                done += n
            signs.append(torch.cat(rows).signbit())
        assert torch.equal(*signs)


# E4M3 from its definition (OCP 8-bit floating point, table 1): the finite magnitudes of the codes 0 to 126
E4M3 = torch.tensor([(m / 8) * 2**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1], dtype=torch.float64)
CALIBRATED = [TorchLayers(), *(NativeLayers(2, isa, "fp8") for isa in instruction_sets())]


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """To the nearest of them times a scale, of two as near ones to the even code."""
    away = (x.double().abs()[..., None] / scale - E4M3).abs()
    code = away.argmin(-1)
    tied = away.gather(-1, (code + 1).clamp(max=126)[..., None])[..., 0] == away.amin(-1)
    return E4M3[code + (tied & (code % 2 == 1) & (code < 126))] * scale * x.double().sign()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [(4, 2, 16, 0), (3, 1, 6, 5), (2, 2, 20, 0)])
def test_attention_over_calibrated_fp8_is_that_over_rounded_keys_and_values(heads: int, kv_heads: int, head_dim: int, window: int) -> None:
    """Some are beyond what was calibrated, many below the smallest normal number."""
    length, scales = 37, (2.0**-7, 2.0**-8)
    x = torch.randn(length, (heads + 2 * kv_heads) * head_dim, generator=torch.Generator().manual_seed(head_dim)) * 1.5
    x[:, ::3] *= 1e-4
    keys, values = slice(heads * head_dim, (heads + kv_heads) * head_dim), slice((heads + kv_heads) * head_dim, None)
    assert (x[:, values].abs() > 448 * scales[1]).any()
    rounded = x.double()
    rounded[:, keys], rounded[:, values] = _rounded(x[:, keys], scales[0]), _rounded(x[:, values], scales[1])
    a = AttentionParameters(heads, kv_heads, head_dim, window, head_dim**-0.5)
    rope = (torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2))  # not rotated, so that fp32 and fp64 round the same numbers
    places = torch.arange(length)
    batch = Batch(places, places, torch.arange(3, dtype=torch.int32)[None], torch.tensor([0, length], dtype=torch.int32))
    results = [ops.attention(x.clone(), a, ops.cache(3, 16, kv_heads, head_dim, scales), rope, batch) for ops in CALIBRATED]
    for y in results:
        _near(y, _dense_attention(rounded, a, rope), "attention")
    assert all(torch.equal(results[1], y) for y in results[2:])


def test_every_code_of_fp8_is_kept_and_every_float_between_is_rounded() -> None:
    """One position: what is read is the value. All codes, what lies halfway between two, and next to that."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    x = torch.cat([E4M3.float(), middles.float(), middles.float().nextafter(torch.tensor(0.0)), middles.float().nextafter(torch.tensor(500.0)), torch.tensor([1e6])])
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 16)])
    one, a = torch.tensor([0]), AttentionParameters(1, 1, len(x), 0, 1.0)
    batch = Batch(one, one, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    for ops in CALIBRATED:
        row, rope = torch.cat([torch.zeros(2 * len(x)), x])[None], (torch.ones(1, len(x) // 2), torch.zeros(1, len(x) // 2))
        assert torch.equal(ops.attention(row, a, ops.cache(1, 16, 1, len(x), (1.0, 1.0)), rope, batch)[0].double(), _rounded(x, 1.0))


def test_keys_and_values_that_are_no_numbers_are_not_hidden_by_fp8() -> None:
    for isa in instruction_sets():
        assert _one_query(NativeLayers(1, isa, "fp8"), math.nan, 1.0, 1.0, 20).isnan().all()
        assert _one_query(NativeLayers(1, isa, "fp8"), 1.0, math.nan, 1.0, 20).isnan().all()
