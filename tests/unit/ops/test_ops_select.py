"""The choice of a kernel, and its reasons."""

from __future__ import annotations

import pytest

from qforge.errors import MissingCapabilityError
from qforge.ops.native_module import instruction_sets
from qforge.ops.select import choose
from qforge.scheme import ACTIVATIONS, parse

_BF16 = "native-bf16" if "amx" in instruction_sets() else "native-a16 (not native-bf16: it gains only where the CPU has AMX)"


@pytest.mark.parametrize("text", ["int4-g64-sym", "int4-g128-asym", "int8-channel-sym", "int3-g32-sym", "int4-tensor-asym", "int8-block128-sym"])
def test_integer_weights_meet_rounded_activations_only_where_asked(text: str) -> None:
    assert choose(parse(text), (256, 256)).explain() == "native"
    assert choose(parse(text), (256, 256), activations="int16").explain() == "native-a16"
    assert choose(parse(text), (256, 256), activations="int8").explain() == "native-a8"
    assert choose(parse(text), (256, 256), activations="bf16").explain() == _BF16


@pytest.mark.parametrize("text", ["fp8-e4m3-channel", "nf4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_other_packed_weights_run_on_the_native_kernel(text: str, activations: str) -> None:
    choice = choose(parse(text), (256, 256), activations=activations)
    if activations == "bf16" and not text.startswith("fp8"):
        assert choice.explain().startswith("native-bf16" if "amx" in instruction_sets() else "native (not native-bf16: it gains only")
        return
    assert choice.kernel.name == "native"
    assert [name for name, reason in choice.passed_over if "multiplies int" in reason] == {
        "fp": [],
        "int16": ["native-a16"],
        "int8": ["native-a8"],
        "bf16": ["native-bf16", "native-a16"],
    }[activations]


@pytest.mark.parametrize("text", ["w8a8-int8", "int8-channel-asym+int8-tensor-static", "int4-g32-sym+int8-token"])
def test_integers_on_both_sides_run_on_the_integer_kernel(text: str) -> None:
    assert choose(parse(text), (256, 256)).explain() == choose(parse(text), (256, 256), activations="int8").explain() == "native-int8"


@pytest.mark.parametrize(("text", "reason"), [("fp8-dynamic", "multiplies integers"), ("int8-g128-sym+int8-g128", "by token"), ("int8-channel-sym+fp8-e4m3-token", "by token")])
def test_other_roundings_are_done_before_the_fp32_product(text: str, reason: str) -> None:
    choice = choose(parse(text), (256, 256))
    assert choice.kernel.name == "native"
    assert reason in choice.explain()


def test_sums_that_could_overflow_are_not_made_in_int32() -> None:
    assert choose(parse("w8a8-int8"), (16, 65536)).kernel.name == "native-int8"
    assert "overflow" in choose(parse("w8a8-int8"), (16, 65544)).explain()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fp8-e5m2-channel", "not fp8-e5m2"),
        ("int4-g32-offset", "real offsets"),
        ("int8-channel-sym+int8-tensor", "whole batch"),
    ],
)
def test_what_the_native_kernel_does_not_run_goes_to_the_reference_with_the_reason(text: str, reason: str) -> None:
    choice = choose(parse(text), (256, 256))
    assert choice.kernel.name == "reference"
    assert reason in choice.explain()


def test_another_device_is_not_run_by_the_cpu_kernel() -> None:
    assert "not on xpu" in choose(parse("int4-g64-sym"), (256, 256), "xpu").explain()


def test_an_environment_variable_limits_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = instruction_sets()
    for i, isa in enumerate(sets):
        monkeypatch.setenv("QFORGE_ISA", isa)
        assert instruction_sets() == sets[i:]
    monkeypatch.setenv("QFORGE_ISA", "avx9")
    with pytest.raises(MissingCapabilityError, match=r"'avx9', which is no instruction set that this CPU runs .* one of .*portable"):
        instruction_sets()
