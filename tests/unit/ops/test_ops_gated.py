"""Activations that are rounded where they are made, by gates and by attention, for a product with integers (kernels/include/qforge/blockwise.h): bits of calls one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_layers import NativeLayers, beginnings

from qforge import numerics
from qforge.ops.layers import AttentionParameters
from qforge.ops.native import NativeRounded
from qforge.ops.native_module import context, instruction_sets, module
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

ISAS = instruction_sets()
FEWEST = 33  # rows that gates take


def _quantized(text: str, out_features: int, in_features: int) -> QuantizedLinear:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, in_features)
    scheme = parse(text)
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))


def _inputs(rows: int, in_features: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, in_features, generator=g) * torch.randn(rows, in_features, generator=g).exp() + 0.3


def _run(isa: str, bits: int, q: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    kernel = NativeRounded(bits, 2, isa)
    return kernel.run(x, kernel.prepack(q))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [FEWEST, 64, 100, 300])
@pytest.mark.parametrize(
    ("before", "after"),
    [("int4-g64-sym", "int4-g64-sym"), ("int4-g32-asym", "int4-g64-asym"), ("int4-g64-sym", "int4-g128-asym"), ("int8-g64-sym", "int4-g128-sym"),
     ("int4-g64-asym", "int4-g32-asym"), ("int4-g64-sym", "int4-g16-sym"), ("int4-g64-sym", "int4-g8-asym"), ("int4-g64-sym", "int8-g64-asym"),
     ("int4-g64-sym", "int4-channel-sym"), ("int4-g64-sym", "int4-channel-asym")],
)  # fmt: skip
@pytest.mark.parametrize("width", [128, 384])
def test_gates_applied_between_products_give_the_bits_of_three_calls(isa: str, bits: int, rows: int, before: str, after: str, width: int) -> None:
    """What lies beside the result stays as it was, a bias is added before the gate, and rows that are no numbers stay alone."""
    q, then, x, activation = _quantized(before, 2 * width, 192), _quantized(after, 40, width), _inputs(rows, 192), module().Activation.SILU
    q = replace(q, bias=torch.randn(2 * width, generator=torch.Generator().manual_seed(2)))
    x[7, 3] = float("inf")
    x[11] = 0
    kernel, run = NativeRounded(bits, 2, isa), context(2, isa)
    products, narrow = _run("portable", bits, q, x), torch.empty(rows, width)
    context(2, "portable").gate(products.data_ptr(), narrow.data_ptr(), rows, width, activation)
    wanted = _run("portable", bits, then, narrow)
    gate_up, down, y = kernel.prepack(q), kernel.prepack(then), torch.full((rows, 43), 7.0)
    assert run.gates(gate_up.view, down.view, rows)
    for junk in (torch.full_like(x, float("nan")), x):  # memory that is used again holds NaN
        run.linear_gated(gate_up.view, down.view, junk.data_ptr(), rows, 192, y.data_ptr(), 43, activation)
    assert torch.equal(y[:, :40].nan_to_num(nan=123.0), wanted.nan_to_num(nan=123.0))
    assert wanted[7].isnan().all()
    assert not wanted[[0, 6, 8, 11]].isnan().any()
    assert (y[:, 40:] == 7).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 16])
def test_gates_are_applied_apart_where_strips_are_no_whole_segments(isa: str, bits: int) -> None:
    kernel, gates = NativeRounded(bits, 2, isa), context(2, isa).gates
    view = lambda *of: kernel.prepack(_quantized(*of)).view  # noqa: E731
    gate_up, down = view("int4-g64-sym", 384, 64), view("int4-g64-sym", 16, 192)
    assert gates(gate_up, down, FEWEST)
    assert not gates(gate_up, down, FEWEST - 1)
    assert not gates(view("int4-g64-sym", 192, 64), down, FEWEST)  # other halves
    assert not gates(view("int4-g32-sym", 192, 64), view("int4-g32-sym", 16, 96), FEWEST)  # half a strip
    assert not gates(gate_up, view("int4-g48-sym", 16, 192), FEWEST)  # a segment in two strips
    with pytest.raises(ValueError, match="no gates are applied"):
        context(2, isa).linear_gated(gate_up, view("int4-g48-sym", 16, 192), 0, FEWEST, 64, 0, 16, module().Activation.SILU)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("queries", [[1], [1, 1], [1] * 9, [40, *[1] * 10], [7, 300, 1]])  # tasks are heads; sequences; both
@pytest.mark.parametrize(
    ("wide", "text"),
    [(64, "int4-g64-sym"), (64, "int4-g64-asym"), (64, "int8-g32-sym"), (32, "int4-g32-asym"), (128, "int4-g128-asym"), (64, "int4-channel-sym")],
)
def test_attention_rounds_for_the_product_after_it(isa: str, bits: int, queries: list[int], wide: int, text: str) -> None:
    ops, kernel, a = NativeLayers(2, isa, "int8"), NativeRounded(bits, 2, isa), AttentionParameters(6, 2, wide, 0, 0.2)
    rows, (batch, blocks) = sum(queries), beginnings(queries)
    q = _quantized(text, 50, 6 * wide)
    after, y = kernel.prepack(q), torch.empty(rows, 50)
    cache, rope = ops.cache(blocks, 16, 2, wide), (torch.ones(max(queries), wide // 2), torch.zeros(max(queries), wide // 2))
    out = ops.attention(_inputs(rows, 10 * wide), a, cache, rope, batch, after.view)
    context(2, isa).linear_rounded(after.view, rows, y.data_ptr(), 50)
    assert torch.equal(y, _run(isa, bits, q, out))
    with pytest.raises(ValueError, match="another number of rows"):
        context(2, isa).linear_rounded(after.view, rows + 1, y.data_ptr(), 50)
    others = [_quantized("int4-g64-sym", 50, 64)]
    if wide == 64:
        others.append(_quantized("int4-g128-asym", 50, 384))  # a block and a half to each head of keys
    for other in others:
        with pytest.raises(ValueError, match="does not round"):
            ops.attention(_inputs(rows, 10 * wide), a, cache, rope, batch, kernel.prepack(other).view)
