"""Laws 4 and 8: every kernel agrees with the reference within its tolerance, odd shapes included, and `supports` tells the truth. And bits: batch, threads, instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import KERNELS

from qforge import numerics
from qforge.ops.kernel import Kernel
from qforge.ops.native import NativeBf16, NativeDense, NativeInt8, NativeKernel, NativeRounded
from qforge.ops.native_module import instruction_sets
from qforge.ops.select import kernels
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Number, Symmetry, parse

SCHEMES = [
    "int4-g8-sym", "int4-g32-asym",
    "int4-g64-sym", "int4-g12-sym", "int4-channel-sym", "int4-channel-asym", "int4-tensor-sym", "int8-g16-asym", "int8-channel-sym", "int8-g128-sym",
    "int3-g16-sym", "int5-g16-asym@f32", "int6-channel-sym", "int8-block24x16-sym", "int4-g32-offset", "fp8-e4m3-channel", "nf4-g16", "fp8-e4m3-block24x16", "fp8-e5m2-tensor",
    "fp4-e2m1-g32@e8m0", "fp4-e2m1-g16@e4m3/tensor:f32", "nf4-g64@u8/g256:f32", "int8-channel-sym+int8-token", "int8-channel-asym+int8-token", "int4-g32-sym+int8-token",
    "int8-g24-asym+int8-token", "int8-tensor-sym+int8-tensor-static", "fp8-e4m3-channel+fp8-e4m3-token", "fp8-e4m3-tensor+fp8-e4m3-tensor-static", "int8-g16-sym+int8-g16",
    "int4-g64-sym@f32", "int4-g96-sym", "int8-g96-sym", "int4-g64-sym+int8-token",  # scales that fp16 does not hold; three segments of 32 inputs; whole tiles of 64
]  # fmt: skip


def _quantized(text: str, out_features: int, groups: int, rest: int, seed: int, order: bool) -> QuantizedLinear:
    scheme = parse(text)
    in_features = groups * scheme.granularity.columns if scheme.granularity.columns and scheme.granularity.per != "block" else groups * 8 + rest
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=g)
    scales, zeros = numerics.minmax_parameters(weight, scheme)
    index = None
    if order and scheme.granularity.per == "g":
        index = (torch.arange(in_features) // scheme.granularity.columns)[torch.randperm(in_features, generator=g)].int()
    bias = torch.randn(out_features, generator=g) if seed % 2 else None
    q = numerics.quantize(weight, scheme, scales, zeros, upper=numerics.super_scales(weight, scheme), group_index=index, bias=bias)
    return replace(q, input_scale=torch.tensor(0.02)) if scheme.activations is not None and scheme.activations.static else q


def _native(q: QuantizedLinear) -> bool:
    return q.scheme.symmetry is not Symmetry.OFFSET and q.scheme.number is not Number.FP8_E5M2


def _kernels(q: QuantizedLinear, threads: int, isa: str | None = None) -> list[Kernel]:
    """The native kernels that run a weight: the fp32 product and those that round activations by themselves; or what a scheme with rounded activations is run by."""
    whole: list[Kernel] = [
        NativeKernel(threads, isa),
        NativeRounded(8, threads, isa),
        NativeRounded(16, threads, isa),
        NativeInt8(threads, isa),
        NativeBf16(threads, isa or instruction_sets()[0]),
    ]
    return [k for k in whole if k.supports(q.scheme, (q.out_features, q.in_features), "cpu") is None]


problems = st.builds(_quantized, st.sampled_from(SCHEMES), st.integers(1, 70), st.integers(1, 9), st.integers(0, 7), st.integers(0, 1000), st.booleans())


@settings(max_examples=150, deadline=None)
@given(q=problems, rows=st.integers(1, 20), seed=st.integers(0, 1000))
def test_kernels_agree_with_fp64_where_they_say_yes_and_only_there(q: QuantizedLinear, rows: int, seed: int) -> None:
    x = torch.randn(rows, q.in_features, generator=torch.Generator().manual_seed(seed))
    rounded = numerics.quantize_activations(x, q.scheme, q.input_scale).double()
    wanted = rounded @ numerics.dequantize(q).double().T + (0 if q.bias is None else q.bias.double())
    answers = {}
    for kernel in kernels(threads=2):
        answers[kernel.name] = kernel.supports(q.scheme, (q.out_features, q.in_features), "cpu")
        if answers[kernel.name] is None:
            y = kernel.run(x, kernel.prepack(q))
            assert y.shape == wanted.shape
            assert y.dtype == torch.float32
            # a sum that cancels has an error relative to its terms, not to itself
            terms = rounded.norm() * numerics.dequantize(q).double().norm() / q.in_features**0.5
            assert (y - wanted).norm() <= KERNELS[kernel.name] * (wanted.norm() + terms)
    assert answers["reference"] is None
    assert (answers["native"] is None) == _native(q)
    assert (answers["native-a8"] is None) == (answers["native-a16"] is None) == (q.scheme.number.is_int and _native(q) and q.scheme.activations is None)
    assert (answers["native-bf16"] is None) == ("amx" in instruction_sets() and not str(q.scheme).startswith("fp8") and _native(q) and q.scheme.activations is None)
    assert (answers["native-int8"] is None) == (q.scheme.number.is_int and str(q.scheme).endswith(("+int8-token", "+int8-tensor-static")))


@settings(max_examples=60, deadline=None)
@given(q=problems.filter(_native), rows=st.integers(1, 230), threads=st.integers(1, 4), seed=st.integers(0, 1000))
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(q: QuantizedLinear, rows: int, threads: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, q.in_features, generator=g)
    order = torch.randperm(rows, generator=g)
    for one, many in zip(_kernels(q, 1), _kernels(q, threads), strict=True):
        packed = one.prepack(q)
        whole = many.run(x, packed)
        assert torch.equal(many.run(x[order], packed), whole[order])
        for i in {0, rows // 2, rows - 1}:
            assert torch.equal(one.run(x[i : i + 1], packed)[0], whole[i])


@settings(max_examples=40, deadline=None)
@given(q=problems.filter(_native), rows=st.integers(1, 50) | st.sampled_from([257, 264, 300]))
def test_instruction_sets_have_the_same_bits(q: QuantizedLinear, rows: int) -> None:
    x = torch.randn(rows, q.in_features, generator=torch.Generator().manual_seed(rows))
    results = [[k.run(x, k.prepack(q)) for k in _kernels(q, 1, isa)] for isa in instruction_sets()]
    assert all(torch.equal(r, first) for other in results for r, first in zip(other, results[0], strict=True))


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g64-asym", "int8-g32-sym", "nf4-g64", "fp8-e4m3-channel"])
@pytest.mark.parametrize("rows", [1, 2, 4, 13])
@pytest.mark.parametrize(("out_features", "threads"), [(1100, 1), (1100, 2), (1643, 2)])  # tasks of 4 tiles, of 2, and odd ones: so many are computed at once
def test_wide_weights_have_the_same_bits_on_each_instruction_set(text: str, rows: int, out_features: int, threads: int) -> None:
    g, scheme = torch.Generator().manual_seed(rows), parse(text)
    weight, x = torch.randn(out_features, 192, generator=g), torch.randn(rows, 192, generator=g)
    q = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))
    first, *others = [NativeKernel(threads, isa) for isa in instruction_sets()]
    assert all(torch.equal(kernel.run(x, kernel.prepack(q)), first.run(x, first.prepack(q))) for kernel in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=25, deadline=None)
@given(shape=st.tuples(st.integers(1, 120), st.integers(1, 70), st.integers(1, 300)), threads=st.integers(1, 3))
def test_dense_rows_have_the_same_bits_in_any_batch(dtype: torch.dtype, shape: tuple[int, int, int], threads: int) -> None:
    rows, out_features, in_features = shape
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, in_features, generator=g), torch.randn(out_features, in_features, generator=g).to(dtype)
    kernel = NativeDense(threads)
    packed = kernel.prepack(weight)
    whole = kernel.run(x, packed)
    for isa in instruction_sets():
        assert torch.equal(NativeDense(1, isa).run(x[-1:], packed)[0], whole[-1])
