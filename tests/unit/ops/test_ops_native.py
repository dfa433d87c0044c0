"""The native module: dispatch, refusals, what happens without it, and dense weights."""

from __future__ import annotations

import importlib
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tolerances import KERNELS

from qforge import numerics
from qforge.ops import native
from qforge.ops.native import NativeDense, NativeKernel, context, instruction_sets
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("isa", instruction_sets())
def test_dense_weights_agree_with_fp64(dtype: torch.dtype, isa: str) -> None:
    g = torch.Generator().manual_seed(0)
    weight, bias, x = torch.randn(70, 100, generator=g).to(dtype), torch.randn(70, generator=g), torch.randn(11, 100, generator=g)
    kernel = NativeDense(2, isa)
    y = kernel.run(x, kernel.prepack(weight, bias))
    wanted = x.double() @ weight.double().T + bias.double()
    assert (y - wanted).norm() <= KERNELS["native-dense", "fp"] * wanted.norm()


def test_every_half_precision_value_is_read_right() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = halves[halves.isfinite()].view(-1, 32)
    for isa in instruction_sets():
        kernel = NativeDense(1, isa)
        assert torch.equal(kernel.run(torch.eye(32), kernel.prepack(weight)), weight.float().T)


def test_activations_are_rounded_where_the_scheme_says_so() -> None:
    scheme = parse("int8-channel-sym+int8-token")
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 64, generator=g), torch.randn(5, 64, generator=g)
    scales, _ = numerics.minmax_parameters(weight, scheme)
    q = numerics.quantize(weight, scheme, scales)
    kernel = NativeKernel(1)
    y, wanted = kernel.run(x, kernel.prepack(q)), numerics.linear(x.double(), q)
    assert (y - wanted).norm() <= 2 * KERNELS["native", "fp"] * wanted.norm()
    assert not torch.allclose(y, kernel.run(x, kernel.prepack(QuantizedLinear(parse("int8-channel-sym"), q.codes, q.scales))), rtol=1e-4)


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

    native.module.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fail)
    try:
        with caplog.at_level(logging.WARNING):
            choices = [choose(parse("int4-g64-sym"), (64, 64)) for _ in range(2)]
    finally:
        monkeypatch.undo()
        native.module.cache_clear()
    assert choices[0].kernel.name == "reference"
    assert choices[0].explain() == "reference (not native: the native module qforge.ops._native was not built)"
    assert len(caplog.records) == 1
