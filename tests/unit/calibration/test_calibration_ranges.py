"""Static activation scales: the largest magnitude on the largest code, or a refusal."""

from __future__ import annotations

import pytest
import torch

from qforge import numerics
from qforge.calibration.ranges import with_input_scale
from qforge.errors import NumericalError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

STATIC = ["int8-channel-sym+int8-tensor-static", "fp8-e4m3-tensor+fp8-e4m3-tensor-static"]


def linear(text: str) -> QuantizedLinear:
    weight, scheme = torch.eye(4), parse(text)
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))


@pytest.mark.parametrize("text", STATIC)
def test_inputs_within_the_range_are_not_clipped(text: str) -> None:
    absmax = torch.tensor([0.1, 3.0, 0.0, 2.0])
    q = with_input_scale(linear(text), absmax)
    assert q.input_scale is not None
    assert q.input_scale.shape == ()
    assert torch.equal(q.input_scale.half().bfloat16().float(), q.input_scale)
    x = torch.stack((absmax, -absmax))
    step = 3.0 / 127 if "int8" in text else 3.0 / 16
    assert (numerics.quantize_activations(x, q.scheme, q.input_scale) - x).abs().max() <= step
    assert (numerics.quantize_activations(10 * x, q.scheme, q.input_scale)).abs().max() < 3.1


def test_other_schemes_are_left_alone() -> None:
    for text in ("int8-channel-sym", "w8a8-int8", "fp8-dynamic"):
        q = linear(text)
        assert with_input_scale(q, None) is q


@pytest.mark.parametrize(("absmax", "message"), [(None, "never reached"), (torch.tensor([1.0, float("nan")]), "NaN"), (torch.tensor([1e30]), "does not fit")])
def test_ranges_that_give_no_scale_are_refused(absmax: torch.Tensor | None, message: str) -> None:
    with pytest.raises(NumericalError, match=message):
        with_input_scale(linear(STATIC[0]), absmax)


def test_an_input_that_is_always_zero_gets_a_scale_of_one() -> None:
    assert with_input_scale(linear(STATIC[0]), torch.zeros(4)).input_scale == 1
