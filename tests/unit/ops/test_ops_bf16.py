"""Products in bf16 against fp64 over the same rounded numbers, and bit for bit between instruction sets (kernels/include/qforge/bf16.h)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from native_layers import NativeLayers, beginnings

from qforge import numerics
from qforge.ops.layers import AttentionParameters
from qforge.ops.native import NativeBf16
from qforge.ops.native_module import context, instruction_sets, module
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

ISAS = [isa for isa in ("amx", "portable") if isa in instruction_sets()]
SCHEMES = ["int4-g64-sym", "int4-g32-asym", "int4-g8-asym", "int8-g64-sym", "int8-channel-asym", "int3-g32-sym", "nf4-g64"]
LONG_SCALES = ["int4-g64-asym@f32", "int8-g64-asym@f32"]  # of 24 bits, where the others have 11


def _quantized(text: str, out_features: int, in_features: int) -> QuantizedLinear:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, in_features)
    scheme = parse(text)
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))


def _run(isa: str, q: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    kernel = NativeBf16(2, isa)
    return kernel.run(x, kernel.prepack(q))


def _inputs(rows: int, in_features: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, in_features, generator=g) * torch.randn(rows, in_features, generator=g).exp()


def _cut(value: torch.Tensor) -> torch.Tensor:
    """To bf16, toward 0."""
    return (value.view(torch.int32) & -0x10000).view(torch.float32).double()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("text", SCHEMES + LONG_SCALES)
@pytest.mark.parametrize("shape", [(16, 64), (70, 192), (49, 320)])
def test_both_sides_are_rounded_to_bf16_once(isa: str, rows: int, text: str, shape: tuple[int, int]) -> None:
    """Weights by the formula of bf16.h: one that is a unit of bf16 off would be 4e-3 off."""
    q, x = _quantized(text, *shape), _inputs(rows, shape[1])
    raised = ((q.scales.float() * (1.0026 if text.startswith(("int4", "int3")) else 1.0028)).view(torch.int32) + 0x1000 & -0x2000).view(torch.float32)
    weight = _cut(numerics.dequantize(replace(q, scales=raised)))
    off = _run(isa, q, x) - x.bfloat16().double() @ weight.T
    assert off.norm() <= 1e-6 * x.norm() * weight.norm() / shape[1] ** 0.5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_bf16_are_within_a_unit_and_unbiased(isa: str, bits: int) -> None:
    """Read one by one. What bf16 has stays, the mean over many scales is right, and errors are a tenth above those of rounding to the nearest (.29 of a unit) at most."""
    scheme, eye = parse(f"int{bits}-g64-sym@f32"), torch.eye(64)
    codes = (torch.arange(64) % 16 * 2 ** (bits - 4) - 2 ** (bits - 1) + torch.arange(64) % 5 * (bits == 8)).to(torch.int8).expand(4096, -1).contiguous()
    scales = 2 ** (torch.rand(4096, 1, generator=torch.Generator().manual_seed(3)) * 4 - 2)  # alike on all scales, as numbers are
    got, exact = _run(isa, QuantizedLinear(scheme, codes, scales), eye).T.double(), codes * scales.double()
    unit = 2.0 ** (exact.abs().clamp_min(1e-9).log2().floor() - 7)
    off = (got.abs() - exact.abs()) / unit
    assert off.abs().max() < 1
    assert (got.abs() / exact.abs() - 1)[codes != 0].mean().abs() < 8e-5  # a fiftieth of a unit
    assert off[codes != 0].std() < 0.32
    assert (got[codes == 0] == 0).all()
    codes = codes.int()
    short = scales.bfloat16().float()
    kept = _run(isa, QuantizedLinear(scheme, codes.to(torch.int8), short), eye).T
    power = (codes.abs() & codes.abs() - 1) == 0  # times a power of two bf16 has it, too
    assert torch.equal(kept[power], (codes * short)[power])


@pytest.mark.parametrize("rows", [1, 2, 5, 15, 16, 17, 31, 33, 64, 300])
@pytest.mark.parametrize("text", SCHEMES + LONG_SCALES)
@pytest.mark.parametrize("shape", [(16, 64), (70, 192), (49, 320), (33, 1088), (17, 72), (40, 40)])
@pytest.mark.skipif("amx" not in instruction_sets(), reason="this CPU has no AMX")
def test_tiles_give_the_bits_of_plain_code(rows: int, text: str, shape: tuple[int, int]) -> None:
    if shape[1] % 64:
        text = re.sub("g64|g32", "g8", text)
    q, x = _quantized(text, *shape), _inputs(rows, shape[1])
    assert torch.equal(_run("amx", q, x), _run("portable", q, x))


@pytest.mark.parametrize("rows", [65, 150, 300])
@pytest.mark.parametrize("text", ["int4-g64-sym", "int4-g96-asym", "int8-g128-sym", "int4-g8-sym"])
@pytest.mark.skipif("amx" not in instruction_sets(), reason="this CPU has no AMX")
def test_slices_of_long_inputs_give_the_bits_of_whole_ones(rows: int, text: str) -> None:
    """Of 32 rows inputs are not cut; of more they are where activations do not fit the L2 cache: into 2 to 6 slices here, which begin within blocks."""
    q, x = _quantized(text, 330, 11904), _inputs(rows, 11904)
    kernel = NativeBf16(2, "amx")
    packed = kernel.prepack(q)
    assert torch.equal(kernel.run(x, packed), torch.cat([kernel.run(some, packed) for some in x.split(32)]))


@pytest.mark.skipif("amx" not in instruction_sets(), reason="this CPU has no AMX")
def test_gates_of_sliced_inputs_give_the_bits_of_whole_ones() -> None:
    """More pairs of tiles in a task than sums are put away together for."""
    rows, width, long = 150, 1040, 8192
    gate_up, down, x = _quantized("int4-g64-sym", 2 * width, long), _quantized("int4-g8-sym", 40, width), _inputs(rows, long)
    kernel, amx = NativeBf16(1, "amx"), context(1, "amx")
    packed, y = [kernel.prepack(q) for q in (gate_up, down)], torch.empty(2, rows, 40)
    for out, step in zip(y, (rows, 32), strict=True):
        for i in range(0, rows, step):
            here, to = x[i : i + step], out[i : i + step]
            amx.linear_gated(packed[0].view, packed[1].view, here.data_ptr(), len(here), long, to.data_ptr(), 40, module().Activation.SILU)
    assert torch.equal(y[0], y[1])


@pytest.mark.parametrize("activation", ["SILU", "GELU_TANH"])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64, 300, 700])
@pytest.mark.parametrize("text", ["int4-g64-sym", "int8-g64-sym", "int4-g8-asym", "nf4-g64"])
@pytest.mark.parametrize("shape", [(32, 64), (64, 128), (96, 192), (416, 320)])  # 1, 2, 3, and 13 tiles of gates
@pytest.mark.skipif("amx" not in instruction_sets(), reason="this CPU has no AMX")
def test_gates_applied_between_products_give_the_bits_of_three_calls(rows: int, text: str, shape: tuple[int, int], activation: str) -> None:
    """What lies beside the result stays as it was."""
    width, wide = shape[0] // 2, 40
    q, after, x = _quantized(text, *shape), _quantized(re.sub("g64", "g8", text), wide, width), _inputs(rows, shape[1])
    kind, kernel, amx = getattr(module().Activation, activation), NativeBf16(2, "amx"), context(2, "amx")
    products, narrow = _run("portable", q, x), torch.empty(rows, width)
    context(2, "portable").gate(products.data_ptr(), narrow.data_ptr(), rows, width, kind)
    gate_up, down, y = kernel.prepack(q), kernel.prepack(after), torch.full((rows, wide + 3), 7.0)
    assert amx.gates(gate_up.view, down.view, rows)
    more = width // 32 * 32 + 32  # memory that is used again holds NaN, also where the last stretch ends early
    before = [kernel.prepack(_quantized(re.sub("g64", "g8", text), *size)) for size in ((2 * more, shape[1]), (wide, more))]
    nothing, unused = torch.full_like(x, float("nan")), torch.empty(rows, wide)
    amx.linear_gated(before[0].view, before[1].view, nothing.data_ptr(), rows, shape[1], unused.data_ptr(), wide, kind)
    assert unused.isnan().all()
    amx.linear_gated(gate_up.view, down.view, x.data_ptr(), rows, shape[1], y.data_ptr(), wide + 3, kind)
    assert torch.equal(y[:, :wide], _run("portable", after, narrow))
    assert (y[:, wide:] == 7).all()


@pytest.mark.parametrize("isa", ISAS)
def test_gates_are_applied_apart_where_halves_are_not_whole_tiles(isa: str) -> None:
    """So also where a bias comes between."""
    plain, biased = _quantized("int4-g8-sym", 64, 64), replace(_quantized("int4-g8-sym", 64, 64), bias=torch.ones(64))
    sizes = [plain, biased, _quantized("int4-g8-sym", 48, 64), _quantized("int4-g8-sym", 16, 32), _quantized("int4-g8-sym", 16, 24)]
    whole, other, half, after, after_half = (NativeBf16(2, isa).prepack(q).view for q in sizes)
    gates = context(2, isa).gates
    assert gates(whole, after, 1) == (isa == "amx")
    assert not any(gates(*pair, 64) for pair in ((other, after), (half, after_half), (whole, after_half)))
    with pytest.raises(ValueError, match="no gates are applied"):
        context(2, isa).linear_gated(half, after_half, 0, 0, 64, 0, 16, module().Activation.SILU)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [[1, 1], [1] * 9, [40, *[1] * 10], [7, 300, 1]])  # tasks are heads; sequences; both
@pytest.mark.parametrize("wide", [32, 64])  # of a head; 64: by AMX's tiles
def test_attention_rounds_for_the_product_after_it(isa: str, queries: list[int], wide: int) -> None:
    ops, kernel, a = NativeLayers(2, isa, "int8"), NativeBf16(2, isa), AttentionParameters(6, 2, wide, 0, 0.2)
    rows, longest, (batch, blocks) = sum(queries), max(queries), beginnings(queries)
    q = _quantized("int4-g64-sym", 50, 6 * wide)
    after, y = kernel.prepack(q), torch.empty(rows, 50)
    cache, rope = ops.cache(blocks, 16, 2, wide), (torch.ones(longest, wide // 2), torch.zeros(longest, wide // 2))
    out = ops.attention(_inputs(rows, 10 * wide), a, cache, rope, batch, after.view)
    context(2, isa).linear_rounded(after.view, rows, y.data_ptr(), 50)
    assert torch.equal(y, _run(isa, q, out))
    with pytest.raises(ValueError, match="does not round"):
        ops.attention(_inputs(rows, 10 * wide), a, cache, rope, batch, kernel.prepack(_quantized("int4-g64-sym", 50, 64)).view)


@pytest.mark.parametrize("isa", ISAS)
def test_results_that_round_up_to_the_smallest_normal_number_are_zero(isa: str) -> None:
    """As x86 has it: looked at after rounding to 24 bits, not to the coarser steps of subnormals."""
    codes = torch.ones(1, 64, dtype=torch.int8)
    q = QuantizedLinear(parse("int4-channel-sym"), codes, torch.full((1, 1), 2.0**-60))
    x = torch.zeros(4, 64)
    x[:, 0] = 2.0**-66
    x[:, 2] = torch.tensor([-1.5, -1.25, -1.75, -1.0]) * 2.0**-91
    assert _run(isa, q, x)[:, 0].tolist() == [0, 0, 0, 2.0**-126]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("text", ["int4-channel-sym", "int4-g8-sym", "nf4-g8"])
def test_nothing_is_read_past_the_last_input(isa: str, text: str) -> None:
    """40 inputs are a stretch of 32 and a part of one: what lies behind is the next row, and what an earlier product left in its scratch."""
    q, longer = _quantized(text, 40, 40), _quantized(text, 40, 64)
    x = _inputs(9, 40)
    wanted = _run(isa, q, x)
    for i in range(3):
        beside = x.clone()
        beside[5 + i] = float("nan")
        assert _run(isa, replace(longer, scales=torch.full_like(longer.scales, float("nan"))), _inputs(9, 64)).isnan().all()
        y = _run(isa, q, beside)
        assert y[5 + i].isnan().all()
        kept = [r for r in range(9) if r != 5 + i]
        assert torch.equal(y[kept], wanted[kept])


@pytest.mark.skipif("amx" not in instruction_sets(), reason="this CPU has no AMX")
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-g32-asym"])
def test_the_smallest_numbers_become_zero_alike(text: str) -> None:
    """Activations, weights and products below the smallest normal number of fp32, and just above it."""
    q = _quantized(text, 40, 96)
    q.scales.view(-1)[:] = torch.logspace(-44, -20, q.scales.numel())
    x = _inputs(20, 96) * torch.logspace(-44, -10, 20)[:, None]
    y = _run("amx", q, x)
    assert torch.equal(y, _run("portable", q, x))
    assert not y[0].any()
    assert y[-1].any()
    assert not ((y != 0) & (y.abs() < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [3, 40])
def test_a_bias_is_added_to_the_sum(isa: str, rows: int) -> None:
    q, x = _quantized("int4-g64-sym", 70, 192), _inputs(rows, 192)
    plain = _run(isa, q, x)
    bias = torch.linspace(-5, 5, 70)
    assert torch.equal(_run(isa, replace(q, bias=bias), x), plain + bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [3, 12, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym", "nf4-g32"])
def test_what_is_no_number_stays_in_its_row_and_in_its_channel(isa: str, rows: int, bad: float, text: str) -> None:
    q = _quantized(text, 40, 96)
    q.scales[7, -1] = bad
    x = torch.ones(rows, 96)
    x[2, 40] = bad
    wrong = ~_run(isa, q, x).isfinite()
    assert wrong[2].all()
    assert wrong[:, 7].all()
    wrong[2], wrong[:, 7] = False, False
    assert not wrong.any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1])
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-g32-sym", "nf4-g32"])
def test_every_nan_stays_one(isa: str, bits: int, text: str) -> None:
    """Rounding may not carry out of its significand into infinity or a sign."""
    q, x = _quantized(text, 40, 96), torch.ones(3, 96)
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    q.scales[7, 1], x[1, 3] = nan, nan
    y = _run(isa, q, x)
    assert y[1].isnan().all()
    assert y[:, 7].isnan().all()
    assert y.isnan().sum() == 40 + 3 - 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym", "nf4-g32"])
def test_rows_and_channels_of_zeros_give_zeros(isa: str, text: str) -> None:
    q = _quantized(text, 40, 96)
    q.scales[3] = 0
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    x[4], x[5] = 0, 1e-44
    y = _run(isa, q, x)
    assert not y[4:6].any()
    assert not y[:, 3].any()
    assert y[0].any()


def test_what_it_does_not_multiply_is_left_to_other_kernels() -> None:
    kernel = NativeBf16(1, "portable")
    assert kernel.supports(parse("nf4-g64"), (16, 64), "cpu") is None
    assert "not fp8-e4m3" in str(kernel.supports(parse("fp8-e4m3-channel"), (16, 64), "cpu"))
    assert "its own way" in str(kernel.supports(parse("int8-channel-sym+int8-token"), (16, 64), "cpu"))
