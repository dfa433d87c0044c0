"""Weights of 8 bits by channel times activations of 16 bits by token, against exact integers (kernels/include/qforge/channels.h)."""

from __future__ import annotations

import pytest
import torch

from qforge import numerics
from qforge.ops.native import MOST_CHANNEL_INPUTS, NativeChannels
from qforge.ops.native_module import instruction_sets
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

ISAS = [isa for isa in ("amx", "portable") if isa in instruction_sets()]


def _quantized(text: str, out_features: int, in_features: int) -> QuantizedLinear:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.2, 3, in_features)
    scheme = parse(text)
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))


def _rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """fp64 rounding of rows to 16 bits."""
    scale = x.double().abs().amax(-1, keepdim=True) / 32512
    return (x.double() / scale).round() * scale


def _eight_bits(q: QuantizedLinear) -> torch.Tensor:
    """fp64: 4-bit weights `[O, I]` brought to 8 bits by channel."""
    groups = q.scales.shape[1]
    codes, scales = q.codes.view(len(q.codes), groups, -1).long(), q.scales.float()[:, :, None]
    zeros = q.zeros.long()[:, :, None] if q.zeros is not None else torch.zeros(1, dtype=torch.long)
    if q.zeros is None:
        codes, zeros = codes + 8, zeros + 8
    reach = torch.maximum(zeros, 15 - zeros)
    scale = (scales.abs() * reach).amax(1, keepdim=True) / 127
    step = (256 * (scales / scale)).round().long()
    return ((((codes - zeros) * step + 128) >> 8) * scale.double()).view(len(q.codes), -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 40])
@pytest.mark.parametrize("text", ["int4-g64-sym", "int4-g32-asym", "int4-g8-asym"])
@pytest.mark.parametrize("shape", [(16, 64), (70, 192), (49, 384)])
def test_four_bits_become_eight_by_channel(isa: str, rows: int, text: str, shape: tuple[int, int]) -> None:
    q = _quantized(text, *shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
    kernel = NativeChannels(2, isa)
    wanted = _rounded_rows(x) @ _eight_bits(q).T
    off = kernel.run(x, kernel.prepack(q)) - wanted
    assert (
        off.norm() <= 1e-5 * x.norm() * _eight_bits(q).norm() / shape[1] ** 0.5
    )  # an activation that fp32 rounds to the other side of a tie is 3e-5 off; a weight off by one would be 1e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("text", ["int4-channel-asym", "int8-channel-sym"])
def test_the_longest_sums_of_the_largest_codes_do_not_overflow(isa: str, rows: int, sign: int, text: str) -> None:
    """Values just below a whole high byte have the low byte -128 as well as the largest high byte."""
    symmetric = text.endswith("sym") and not text.endswith("asym")
    code = 127 if symmetric else 15
    codes = torch.full((16, MOST_CHANNEL_INPUTS), code, dtype=torch.int8 if symmetric else torch.uint8)
    q = QuantizedLinear(parse(text), codes, torch.ones(16, 1), None if symmetric else torch.zeros(16, 1, dtype=torch.uint8))
    x = torch.full((rows, MOST_CHANNEL_INPUTS), sign * (1 - 128 / 32512))
    x[:, 0] = sign
    kernel = NativeChannels(2, isa)
    wanted = x.double().sum(1, keepdim=True).expand(-1, 16) * code
    assert torch.allclose(kernel.run(x, kernel.prepack(q)).double(), wanted, rtol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym"])
def test_what_is_no_number_stays_in_its_row_and_in_its_channel(isa: str, rows: int, bad: float, text: str) -> None:
    q = _quantized(text, 40, 96)
    q.scales[7, -1] = bad
    x = torch.ones(rows, 96)
    x[2, 40] = bad
    kernel = NativeChannels(2, isa)
    wrong = ~kernel.run(x, kernel.prepack(q)).isfinite()
    assert wrong[2].all()
    assert wrong[:, 7].all()
    wrong[2], wrong[:, 7] = False, False
    assert not wrong.any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym"])
def test_rows_and_channels_of_zeros_give_zeros(isa: str, text: str) -> None:
    q = _quantized(text, 40, 96)
    q.scales[3] = 0
    x = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    x[4], x[5] = 0, 1e-44
    kernel = NativeChannels(2, isa)
    y = kernel.run(x, kernel.prepack(q))
    assert not y[4:6].any()
    assert not y[:, 3].any()
    assert y[0].any()


def test_more_inputs_than_sums_can_hold_are_left_to_other_kernels() -> None:
    kernel = NativeChannels(1, "portable")
    assert kernel.supports(parse("int8-channel-sym"), (16, MOST_CHANNEL_INPUTS), "cpu") is None
    assert "overflow" in str(kernel.supports(parse("int8-channel-sym"), (16, MOST_CHANNEL_INPUTS + 8), "cpu"))
