"""The native module: dispatch, refusals, what happens without it, and dense weights."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tolerances import KERNELS

from qforge import numerics
from qforge.ops.memory import Arena
from qforge.ops.native import NativeDense, NativeInt8, NativeKernel, NativeRounded
from qforge.ops.native_module import context, instruction_sets, module
from qforge.ops.select import choose
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def test_the_portable_instruction_set_is_always_there() -> None:
    assert instruction_sets()[-1] == "portable"


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="sse9"):
        context(1, "sse9")


def test_the_number_of_threads_is_as_asked() -> None:
    assert context(3).threads == 3


def test_threads_end_with_the_interpreter_whoever_holds_the_modules() -> None:
    code = """
import ctypes
from qforge.methods import native as solver
from qforge.ops import native_module as native
native.context(2)
solver._pool(2)
for kept in (native.context, solver._pool):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # as somebody who never lets go
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", instruction_sets())
def test_dense_weights_agree_with_fp64(dtype: torch.dtype, isa: str) -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias, x = torch.randn(70, 100, generator=g).to(dtype), torch.randn(70, generator=g), torch.randn(11, 100, generator=g)
    kernel = NativeDense(2, isa)
    y = kernel.run(x, kernel.prepack(weight, bias))
    wanted = x.double() @ weight.double().T + bias.double()
    assert (y - wanted).norm() <= KERNELS["native-dense"] * wanted.norm()


def test_every_half_precision_value_is_read_right() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = halves[halves.isfinite()].view(-1, 32)
    for isa in instruction_sets():
        kernel = NativeDense(1, isa)
        assert torch.equal(kernel.run(torch.eye(32), kernel.prepack(weight)), weight.float().T)


IDENTITY = QuantizedLinear(parse("int8-tensor-sym+int8-token"), torch.eye(64, dtype=torch.int8), torch.ones(1, 1))


@pytest.mark.parametrize("isa", instruction_sets())
def test_the_integer_kernel_rounds_activations_to_the_bits_of_the_reference(isa: str) -> None:
    """The identity as weights gives back what inputs were rounded to."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=g) * 10 ** (3 * torch.randn(200, 1, generator=g))
    x[3], x[4], x[5, 1:], x[6] = 0, 1e-44, 0, 3e38
    kernel = NativeInt8(2, isa)
    assert torch.equal(kernel.run(x, kernel.prepack(IDENTITY)), numerics.quantize_activations(x, IDENTITY.scheme))
    static = replace(IDENTITY, scheme=parse("int8-tensor-sym+int8-tensor-static"), input_scale=torch.tensor(0.03))
    assert torch.equal(kernel.run(x, kernel.prepack(static)), numerics.quantize_activations(x, static.scheme, static.input_scale))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_with_infinities_give_nan_and_leave_others_alone(isa: str, bad: float) -> None:
    x = torch.ones(40, 64)
    x[7, 63] = bad
    kernel = NativeInt8(1, isa)
    y = kernel.run(x, kernel.prepack(IDENTITY))
    assert y[7].isnan().all()
    assert not y[:7].isnan().any()
    assert not y[8:].isnan().any()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_sums_of_the_largest_codes_are_exact(isa: str, rows: int) -> None:
    q = QuantizedLinear(parse("int8-channel-asym+int8-token"), torch.full((20, 65536), 255, dtype=torch.uint8), torch.ones(20, 1), torch.zeros(20, 1, dtype=torch.uint8))
    kernel = NativeInt8(2, isa)
    assert (kernel.run(torch.full((rows, 65536), -127.5), kernel.prepack(q)) == -128 * 255 * 65536).all()


# Segments are rounded by fours: four of them and three
UNITS = QuantizedLinear(parse("int8-g32-asym"), torch.eye(224, dtype=torch.uint8), torch.ones(224, 7), torch.zeros(224, 7, dtype=torch.uint8))
UNITS_OF_4_BITS = QuantizedLinear(parse("int4-g64-asym"), torch.eye(448, dtype=torch.uint8), torch.ones(448, 7), torch.zeros(448, 7, dtype=torch.uint8))


def _rounded(x: torch.Tensor, bits: int, scheme: str, block: int = 0) -> torch.Tensor:
    """fp64 rounding in segments of 32 inputs, scale = largest / most; or, to 8 bits for weights of 4, of 64 inputs, scale = (largest - smallest) / 239.75.

    `block`: where segments begin anew."""
    around_a_middle = bits == 8 and scheme.startswith("int4")
    length, block = 64 if around_a_middle else 32, block or x.shape[1]
    short = -block % length
    segments = torch.nn.functional.pad(x.double().view(len(x), -1, block), (0, short)).view(len(x), -1, length)
    there = torch.nn.functional.pad(torch.ones(1, x.shape[1] // block, block), (0, short)).view(1, -1, length) > 0
    largest, high, low = (
        segments.abs().amax(-1, keepdim=True),
        *(torch.where(there, segments, fill).aminmax(dim=-1, keepdim=True)[i] for fill, i in ((-torch.inf, 1), (torch.inf, 0))),
    )
    scale = torch.maximum(high / 2 - low / 2, largest / 32) / 119.875 if around_a_middle else largest / (127 if bits == 8 else 32512)
    rounded = torch.where(scale > 0, (segments / torch.where(scale > 0, scale, 1)).round() * scale, 0)
    return rounded.view(len(x), -1, block + short)[..., :block].reshape(len(x), -1)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("bits", "units"), [(8, UNITS), (16, UNITS), (8, UNITS_OF_4_BITS)])
def test_activations_are_rounded_by_segments(isa: str, bits: int, units: QuantizedLinear) -> None:
    """The identity as weights gives back what inputs were rounded to, but for ties that fp32 sees and fp64 does not (or the other way round)."""
    x = torch.randn(64, units.in_features, generator=torch.Generator().manual_seed(0)) * 10 ** (3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(1)))
    large = 1e33 if units is UNITS_OF_4_BITS else 3e38  # below 2^110, or whatever a float holds
    x[3], x[4], x[5, 33:], x[6], x[7] = 0, 1e-44, 0, large, x[7].abs()
    x[8], x[9], x[10, ::2] = x[8] + 1000 * x[8].abs().max(), x[9] - 2 * x[9].abs().max(), -large
    kernel = NativeRounded(bits, 2, isa)
    wanted = _rounded(x, bits, str(units.scheme))
    wanted[4] = 0  # below 2^-100
    wrong = (kernel.run(x, kernel.prepack(units)).double() - wanted).abs() > 2e-5 * wanted.abs().amax(-1, keepdim=True) / (1 if bits == 8 else 100)
    assert wrong.float().mean() < (1e-3 if bits == 8 else 2e-2)
    assert not wrong[3:5].any()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [40, 127, 128, 223])
@pytest.mark.parametrize("units", [UNITS, UNITS_OF_4_BITS])
@pytest.mark.parametrize("rows", [12, 20])
def test_infinities_in_a_segment_give_nan_in_its_row_alone(isa: str, bits: int, bad: float, place: int, units: QuantizedLinear, rows: int) -> None:
    x = torch.ones(rows, units.in_features)
    x[7, place * units.in_features // 224] = bad
    kernel = NativeRounded(bits, 2, isa)
    y = kernel.run(x, kernel.prepack(units))
    assert y[7].isnan().all()
    assert not y[[0, 6, 8, rows - 1]].isnan().any()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("rows", [12, 20])
def test_segments_around_a_middle_have_no_numbers_from_2_to_the_110_on(isa: str, rows: int) -> None:
    x = torch.ones(rows, UNITS_OF_4_BITS.in_features)
    x[7, 100:102], x[8, 100:102] = torch.tensor([[2.0**110, -(2.0**110)], [2.0**109, -(2.0**109)]])
    kernel = NativeRounded(8, 2, isa)
    y = kernel.run(x, kernel.prepack(UNITS_OF_4_BITS))
    assert y[7].isnan().all()
    assert not y[[0, 6, 8, rows - 1]].isnan().any()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("scheme", "code"), [("int4-g32-asym", 15), ("int4-g64-asym", 15), ("int4-g128-asym", 15), ("int8-g128-asym", 255)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [20, 30])  # enough for products by pairs, without panels and with them
def test_segments_of_the_largest_codes_do_not_overflow(isa: str, bits: int, scheme: str, code: int, sign: int, rows: int) -> None:
    """Values just below a whole high byte have the low byte -128 as well as the largest high byte. Codes are the largest around a middle 32 half widths from 0."""
    groups = 128 // parse(scheme).granularity.columns
    q = QuantizedLinear(parse(scheme), torch.full((20, 128), code, dtype=torch.uint8), torch.ones(20, groups), torch.zeros(20, groups, dtype=torch.uint8))
    x = torch.full((rows, 128), sign * (1 - 128 / 32512))
    x[:, ::32] = sign
    kernel = NativeRounded(bits, 2, isa)
    rounded = x if bits == 16 else _rounded(x, bits, scheme, 128 // groups) if scheme.startswith("int4") else x.mul(127).round() / 127  # ties of fp32
    wanted = rounded.double().sum(1, keepdim=True).expand(-1, 20) * code
    assert torch.allclose(kernel.run(x, kernel.prepack(q)).double(), wanted, rtol=1e-6)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("columns", ["int4-g64-asym", "int4-g128-asym"])
@pytest.mark.parametrize("first", [0, 15])
@pytest.mark.parametrize("second", [0, 15])
@pytest.mark.parametrize("rows", [3, 5, 16, 21, 30])
def test_sums_of_the_outermost_codes_fit_a_byte(isa: str, columns: str, first: int, second: int, rows: int) -> None:
    """Of each eight inputs, the first four and the others have the largest or the smallest code, of activations (120, -120) as of weights; scales are 1, so that sums are exact."""
    half = torch.arange(256) // 4 % 2
    codes = torch.where(half == 0, first, second).to(torch.uint8).expand(32, 256)
    q = QuantizedLinear(
        parse(columns), codes.contiguous(), torch.ones(32, 256 // parse(columns).granularity.columns), torch.zeros(32, 256 // parse(columns).granularity.columns, dtype=torch.uint8)
    )
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]])[torch.arange(rows) % 4]
    x = torch.where(half == 0, signs[:, :1], signs[:, 1:]) * 120.0
    x[:, 0::64], x[:, 1::64] = 119.875, -119.875  # scale 1
    kernel = NativeRounded(8, 2, isa)
    wanted = (x.sign() * 120).double() @ codes.double().T
    assert torch.equal(kernel.run(x.clamp(-119.875, 119.875), kernel.prepack(q)).double(), wanted)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("scheme", ["int4-g64-asym", "int8-g64-asym", "int4-g32-asym"])
@pytest.mark.parametrize("odd_one", [None, (0, 0), (17, 1)])
def test_one_zero_point_and_others(isa: str, bits: int, scheme: str, odd_one: tuple[int, int] | None) -> None:
    """Weights whose zero points are one number are summed from offsets; one other zero point, in a whole tile or in the last one, and they may not be."""
    seeded = torch.Generator().manual_seed(0)
    groups = 128 // parse(scheme).granularity.columns
    codes = torch.randint(0, 2 ** parse(scheme).bits, (20, 128), generator=seeded, dtype=torch.uint8)
    zeros = torch.full((20, groups), 11, dtype=torch.uint8)
    if odd_one is not None:
        zeros[odd_one] = 3
    q = QuantizedLinear(parse(scheme), codes, torch.rand(20, groups, generator=seeded) + 0.5, zeros)
    x = torch.randn(40, 128, generator=seeded)
    wanted = _rounded(x, bits, scheme, 128 // groups) @ numerics.dequantize(q).double().T
    kernel = NativeRounded(bits, 2, isa)
    for rows in (1, 3, 9, 40):
        assert (kernel.run(x[:rows], kernel.prepack(q)).double() - wanted[:rows]).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rows", [3, 18])
@pytest.mark.parametrize(("scheme", "inputs", "block"), [("int4-g96-asym", 2208, 96), ("int8-channel-asym", 4136, 88), ("int4-g64-asym", 4160, 64)])
def test_rows_of_more_segments_than_are_rounded_at_once(isa: str, bits: int, rows: int, scheme: str, inputs: int, block: int) -> None:
    """Blocks that end at the end of 64 segments and that do not, and blocks whose last segment is short."""
    seeded = torch.Generator().manual_seed(0)
    groups = inputs // (parse(scheme).granularity.columns if "channel" not in scheme else inputs)
    codes = torch.randint(0, 2 ** parse(scheme).bits, (20, inputs), generator=seeded, dtype=torch.uint8)
    zeros = torch.randint(5, 11, (20, groups), generator=seeded, dtype=torch.uint8)
    q = QuantizedLinear(parse(scheme), codes, torch.rand(20, groups, generator=seeded) + 0.5, zeros)
    x = torch.randn(rows, inputs, generator=seeded) * torch.arange(1, inputs + 1).sqrt()
    x[1, 2048:2080] = 0
    wanted = _rounded(x, bits, scheme, block) @ numerics.dequantize(q).double().T
    kernel = NativeRounded(bits, 2, isa)
    packed = kernel.prepack(q)
    assert packed.tiles.block_k == block
    assert (kernel.run(x, packed).double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("scheme", "inputs"), [("int4-g128-sym", 3200), ("int4-g32-asym", 4128), ("int4-channel-sym", 5632), ("int4-g128-sym", 10368), ("int8-g64-sym", 2240)])
def test_few_rows_beside_tiles_as_large_as_the_first_cache(isa: str, bits: int, scheme: str, inputs: int) -> None:
    """Rows that are kept in that cache, and rows too large for it: they have the bits that they have among more, which nothing is done for."""
    seeded = torch.Generator().manual_seed(0)
    weight, x = torch.randn(40, inputs, generator=seeded), torch.randn(5, inputs, generator=seeded)
    q = numerics.quantize(weight, parse(scheme), *numerics.minmax_parameters(weight, parse(scheme)))
    kernel = NativeRounded(bits, 2, isa)
    packed = kernel.prepack(q)
    wanted, among = x.double() @ numerics.dequantize(q).double().T, kernel.run(x, packed)
    assert (among.double() - wanted).norm() < (2e-2 if bits == 8 else 1e-4) * wanted.norm()
    for rows in (1, 2):
        assert torch.equal(kernel.run(x[:rows], packed), among[:rows])


def test_a_weight_says_what_one_row_reads_and_refuses_what_no_kernel_takes() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    q = {text: numerics.quantize(weight, parse(text), *numerics.minmax_parameters(weight, parse(text))) for text in ("int4-g64-sym", "int4-g64-asym", "int4-g64-sym@f32")}
    codes, numbers = 32 * 128 // 2, 32 * 2  # bytes; scales
    for kernel, text, wanted in (
        (NativeRounded(8), "int4-g64-sym", codes + 2 * numbers),
        (NativeRounded(16), "int4-g64-asym", codes + 3 * numbers),
        (NativeRounded(8), "int4-g64-sym@f32", codes + 4 * numbers),
        (NativeKernel(), "int4-g64-sym", codes + 5 * numbers),
    ):
        assert kernel.prepack(q[text]).weight.nbytes == wanted
    rounded = NativeRounded(8).prepack(q["int4-g64-sym"]).weight
    with pytest.raises(ValueError, match="scales in fp16 are for"):
        replace(rounded, activations="F32").view()
    with pytest.raises(ValueError, match="need the sums of the weight's codes"):
        replace(rounded, code_sums=None).view()
    for kernel, text in ((NativeRounded(16), "int4-g64-sym"), (NativeRounded(8), "int4-g32-sym")):
        weight_of = kernel.prepack(numerics.quantize(weight, parse(text), *numerics.minmax_parameters(weight, parse(text)))).weight
        with pytest.raises(ValueError, match="sums of pairs are for whole segments"):
            replace(weight_of, pair_sums=rounded.codes).view()


def test_packed_weights_outlive_the_region_that_others_lie_in() -> None:
    arena = Arena()
    tensors = [torch.randn(n, 33) for n in (1, 7, 400_000, 600_000, 3)]
    placed = [arena.place(t) for t in tensors]
    assert all(p.data_ptr() % 64 == 0 and torch.equal(p, t) for p, t in zip(placed, tensors, strict=True))
    assert arena.place(torch.empty(0, 4)).shape == (0, 4)


def test_every_e4m3_value_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(-1, 1).repeat(1, 8)
    codes = torch.where((codes & 127) == 127, torch.zeros_like(codes), codes)
    q = QuantizedLinear(parse("fp8-e4m3-tensor"), codes, torch.ones(1, 1))
    for isa in instruction_sets():
        kernel = NativeKernel(1, isa)
        for rows in (1, 8):
            assert torch.equal(kernel.run(torch.eye(8)[:rows], kernel.prepack(q)), numerics.dequantize(q).T[:rows])


def test_a_row_stride_is_respected() -> None:
    wide = torch.randn(4, 128)
    kernel = NativeDense(1)
    packed = kernel.prepack(torch.randn(16, 64))
    assert torch.equal(kernel.run(wide[:, :64], packed), kernel.run(wide[:, :64].contiguous(), packed))


def test_callers_in_several_threads_take_turns() -> None:
    kernel = NativeDense(3)
    x = torch.randn(40, 64)
    weights = [torch.randn(96, 64) for _ in range(4)]
    packed = [kernel.prepack(w) for w in weights]
    wanted = [kernel.run(x, p) for p in packed]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: (i % 4, kernel.run(x, packed[i % 4])), range(400)))
    assert all(torch.equal(y, wanted[i]) for i, y in results)


def test_no_rows_give_no_rows() -> None:
    kernel = NativeDense(2)
    assert kernel.run(torch.empty(0, 64), kernel.prepack(torch.randn(16, 64))).shape == (0, 16)


def test_without_the_module_the_reference_runs_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> None:
        raise ImportError("no compiler")

    module.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fail)
    try:
        with caplog.at_level(logging.WARNING):
            choices = [choose(parse("int4-g64-sym"), (64, 64)) for _ in range(2)]
    finally:
        monkeypatch.undo()
        module.cache_clear()
    assert choices[0].kernel.name == "reference"
    assert dict(choices[0].passed_over) == {"native": "the native module qforge.ops._native was not built"}
    assert len(caplog.records) == 1
