"""Descent after rounding: never a larger error, stored scales stay exact, native and PyTorch agree, a brute-force optimum on a tiny row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qforge import numerics
from qforge.methods import Options, Stats, find, gptq, native, refine
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

SCHEMES = ["int2-g16-sym", "int3-g16-asym", "int4-g16-sym", "int4-g16-asym", "int4-channel-sym", "int8-g32-sym", "int4-g16-sym@f32"]
FLOATS = ["fp8-e4m3-channel", "fp8-e5m2-g32", "nf4-g16", "fp4-e2m1-g16@e8m0"]


def problem(seed: int, out_features: int = 24, in_features: int = 64, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a damped Hessian of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, in_features, generator=g) @ torch.randn(in_features, in_features, generator=g)
    hessian = mixed.T @ mixed
    return torch.randn(out_features, in_features, generator=g), hessian + 0.01 * hessian.diagonal().mean() * torch.eye(in_features)


def error(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor) -> torch.Tensor:
    """tr((W - Q) H (W - Q)^T) by rows, in fp64."""
    e = weight.double() - numerics.dequantize(q).double()
    return ((e @ hessian.double()) * e).sum(1)


def rounded(weight: torch.Tensor, text: str) -> QuantizedLinear:
    method = find("rtn")
    assert method is not None
    return method.quantize(weight, parse(text), None, Options())[0]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SCHEMES + FLOATS), st.integers(0, 2**31))
def test_no_row_gets_worse_and_scales_stay_exact(text: str, seed: int) -> None:
    weight, hessian = problem(seed)
    q = rounded(weight, text)
    better = refine.refine(weight, q, hessian, 3)
    assert (error(weight, better, hessian) <= error(weight, q, hessian) * (1 + 1e-4)).all()
    assert error(weight, better, hessian).sum() < error(weight, q, hessian).sum()
    assert torch.equal(numerics.round_scale(better.scales, better.scheme.scale.type), better.scales)
    if better.scheme.number.is_int:
        low, high = better.scheme.code_range
        assert better.codes.min() >= low
        assert better.codes.max() <= high
    assert numerics.dequantize(better).isfinite().all()


@pytest.mark.parametrize("text", SCHEMES)
def test_native_equals_torch(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.module() is not None, "the native module was not built"
    weight, hessian = problem(3)
    q = rounded(weight, text)
    fast = refine.refine(weight, q, hessian, 2)
    monkeypatch.setattr(native, "runs", lambda scheme: False)
    plain = refine.refine(weight, q, hessian, 2)
    assert (fast.codes == plain.codes).float().mean() > 0.995  # sums in another order; a flip changes its row a little
    torch.testing.assert_close(error(weight, fast, hessian).sum(), error(weight, plain, hessian).sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("text", SCHEMES + FLOATS)
@pytest.mark.parametrize("by_native", [True, False])
def test_a_row_alone_becomes_what_it_becomes_beside_others(text: str, by_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_native:
        monkeypatch.setattr(native, "runs", lambda scheme: False)
    weight, hessian = problem(7, out_features=4, in_features=288)
    whole = error(weight, refine.refine(weight, rounded(weight, text), hessian, 2), hessian)
    for row in range(4):
        one = weight[row : row + 1]
        torch.testing.assert_close(error(one, refine.refine(one, rounded(one, text), hessian, 2), hessian), whole[row : row + 1], rtol=1e-2, atol=0)  # sums in another order


@pytest.mark.parametrize(("text", "possible"), [("int4-g16-sym", range(-8, 8)), ("nf4-g16", range(16)), ("fp8-e4m3-channel", [*range(0x7F), *range(0x80, 0xFF)])])
def test_every_code_is_the_best_one_given_the_others(text: str, possible: Sequence[int]) -> None:
    weight, hessian = problem(5, out_features=3, in_features=16)
    q = refine.refine(weight, rounded(weight, text), hessian, 50)
    least = error(weight, q, hessian)
    for row, column, code in itertools.product(range(3), range(16), possible):
        codes = q.codes.clone()
        codes[row, column] = code
        other = error(weight, QuantizedLinear(q.scheme, codes, q.scales), hessian)
        assert other[row] >= least[row] * (1 - 1e-4)


def test_a_dead_input_keeps_its_code_and_gptq_gains() -> None:
    weight, hessian = problem(7)
    hessian[5] = hessian[:, 5] = 0
    q = rounded(weight, "int4-g16-sym")
    assert torch.equal(refine.refine(weight, q, hessian, 1).codes[:, 5], q.codes[:, 5])
    method = find("gptq")
    assert method is not None
    weight, hessian = problem(8)
    results = [method.quantize(weight, parse("int3-g16-sym"), Stats(200, hessian), Options(refine=sweeps))[0] for sweeps in (0, 3)]
    assert error(weight, results[1], hessian).sum() < 0.95 * error(weight, results[0], hessian).sum()


def test_error_correction_aims_at_the_original_outputs() -> None:
    g = torch.Generator().manual_seed(2)
    y = torch.randn(4000, 32, generator=g) @ torch.randn(32, 32, generator=g)
    x = y + 0.3 * torch.randn(4000, 32, generator=g) @ torch.randn(32, 32, generator=g)
    weight = torch.randn(16, 32, generator=g)
    method = find("gptq")
    assert method is not None
    got = {}
    for cross in (None, (y - x).T @ x):
        q, _ = method.quantize(weight, parse("int8-g16-sym"), Stats(4000, x.T @ x, cross), Options(damping=1e-6))
        got[cross is None] = (x @ numerics.dequantize(q).T - y @ weight.T).square().mean()
    best = torch.linalg.lstsq(x.double(), (y @ weight.T).double()).solution
    floor = (x.double() @ best - y.double() @ weight.T.double()).square().mean()
    assert got[False] < 1.02 * floor  # 8 bits: what is left is what no weight could give
    assert got[True] > 1.2 * floor


def test_error_correction_makes_up_for_what_the_residual_stream_lacks() -> None:
    g = torch.Generator().manual_seed(3)
    y = torch.randn(4000, 32, generator=g) @ torch.randn(32, 32, generator=g)
    x = y + 0.3 * torch.randn(4000, 32, generator=g) @ torch.randn(32, 32, generator=g)
    weight = torch.randn(16, 32, generator=g)
    lacking = 3 * x @ torch.randn(32, 16, generator=g) / 32**0.5 + torch.randn(4000, 16, generator=g)
    method = find("gptq")
    assert method is not None
    stats = Stats(4000, x.T @ x, (y - x).T @ x, residual=lacking.T @ x)
    q, _ = method.quantize(weight, parse("int8-g16-sym"), stats, Options(damping=1e-6))
    wanted = (y @ weight.T + gptq.RESIDUAL * lacking).double()
    best = torch.linalg.lstsq(x.double(), wanted).solution
    floor = (x.double() @ best - wanted).square().mean()
    assert (x.double() @ numerics.dequantize(q).double().T - wanted).square().mean() < 1.02 * floor
    without, _ = method.quantize(weight, parse("int8-g16-sym"), Stats(4000, x.T @ x, (y - x).T @ x), Options(damping=1e-6))
    assert (x.double() @ numerics.dequantize(without).double().T - wanted).square().mean() > 1.5 * floor
    weight[3] = 0
    pruned, _ = method.quantize(weight, parse("int8-g16-sym"), stats, Options(damping=1e-6))
    assert not numerics.dequantize(pruned)[3].any()


@pytest.mark.parametrize("text", ["int4-g16-sym", "int4-g16-asym", "nf4-g16"])
def test_rows_a_few_at_a_time_give_what_all_at_once_do(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    weight, hessian = problem(9)
    q = rounded(weight, text)
    whole = refine.refine(weight, q, hessian, 2)
    monkeypatch.setattr(refine, "ELEMENTS", 7 * weight.shape[1])  # 24 rows in chunks of 7, 7, 7 and 3
    parts = refine.refine(weight, q, hessian, 2)
    assert (parts.codes == whole.codes).float().mean() > 0.995  # products of another shape are summed in another order
    torch.testing.assert_close(error(weight, parts, hessian), error(weight, whole, hessian), rtol=0.01, atol=0)
