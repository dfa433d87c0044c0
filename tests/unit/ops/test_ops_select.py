"""The choice of a kernel, and its reasons."""

from __future__ import annotations

import pytest

from qforge.ops.select import choose
from qforge.scheme import parse


@pytest.mark.parametrize("text", ["int4-g64-sym", "int4-g128-asym", "int8-channel-sym", "int3-g32-sym", "int8-channel-sym+int8-token", "int4-tensor-asym", "int8-block128-sym"])
def test_integers_run_on_the_native_kernel(text: str) -> None:
    assert choose(parse(text), (256, 256)).explain() == "native"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp8-e4m3-channel", "not fp8-e4m3"),
        ("nf4-g64", "not nf4"),
        ("int4-g32-offset", "real offsets"),
        ("int8-channel-sym+int8-tensor", "whole batch"),
    ],
)
def test_what_the_native_kernel_does_not_run_goes_to_the_reference_with_the_reason(text: str, reason: str) -> None:
    choice = choose(parse(text), (256, 256))
    assert choice.kernel.name == "reference"
    assert reason in choice.explain()


def test_another_device_is_not_run_by_the_cpu_kernel() -> None:
    assert "not on cuda" in choose(parse("int4-g64-sym"), (256, 256), "cuda").explain()
