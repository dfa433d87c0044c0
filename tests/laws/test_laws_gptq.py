"""Law 6: GPTQ equals a dense, unblocked fp64 formulation written independently, and its mean error over 100 seeded problems is below RTN's."""

from __future__ import annotations

import pytest
import torch

from qforge import numerics
from qforge.errors import NumericalError
from qforge.methods import Options, Stats, find, gptq, native
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse


def problem(seed: int, out_features: int = 24, in_features: int = 96, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(in_features, in_features, generator=g) / in_features**0.5 + torch.eye(in_features)
    x = torch.randn(tokens, in_features, generator=g) @ mix * (torch.rand(in_features, generator=g) * 3 + 0.1)
    return torch.randn(out_features, in_features, generator=g), x


def solve(name: str, weight: torch.Tensor, x: torch.Tensor, scheme: str, options: Options) -> QuantizedLinear:
    method = find(name)
    assert method is not None
    return method.quantize(weight, parse(scheme), Stats(len(x), x.T @ x), options)[0]


def dense(weight: torch.Tensor, x: torch.Tensor, q: QuantizedLinear, options: Options) -> torch.Tensor:
    """Optimal brain quantization in a fixed order, straight from the elimination view: after a column is fixed, the rest takes the least-squares
    optimum given the error, and the inverse Hessian of the rest is the Schur complement. No Cholesky, no blocks; fp64. Returns values, not codes."""
    h = (x.T @ x).double()
    damping = options.damping * min(max(1, 8 * len(h) / len(x)), 100)  # more where few tokens say what H is
    h += torch.eye(len(h)).double() * damping * h.diagonal().mean()
    order = torch.argsort(torch.diagonal(x.T @ x), descending=True, stable=True) if options.act_order else torch.arange(len(h))
    inverse = torch.linalg.inv(h)
    w = weight.double().clone()
    scale = numerics.expand(q.scales, q.scheme, *w.shape).expand_as(w).double()
    zero = torch.zeros_like(w) if q.zeros is None else numerics.expand(q.zeros, q.scheme, *w.shape).expand_as(w).double()
    low, high = q.scheme.code_range
    book = None if q.scheme.number.is_int else values_of(q.scheme)
    left = order.tolist()
    while left:
        j = left.pop(0)
        value = (torch.clamp(torch.round(w[:, j] / scale[:, j]) + zero[:, j], low, high) - zero[:, j]) * scale[:, j]
        if book is not None:
            value = book[(w[:, j, None] / scale[:, j, None] - book).abs().argmin(1)] * scale[:, j]
        error = (w[:, j] - value) / inverse[j, j]
        w[:, left] -= error[:, None] * inverse[j, left]
        w[:, j] = value
        column = inverse[:, j].clone()
        inverse -= torch.outer(column, column) / column[j]
    return w


def values_of(scheme: Scheme) -> torch.Tensor:
    """What the codes of a float type or of a code book stand for at scale 1, fp64, each once."""
    values = numerics.decode(torch.arange(1 << scheme.bits).to(torch.uint8), torch.ones(()), None, scheme).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize(
    "scheme",
    ["int4-g32-sym", "int4-g32-asym", "int3-g96-sym", "int8-channel-sym", "int2-g16-asym", "fp8-e4m3-channel", "fp8-e4m3-block32", "nf4-g32@u8/g256:f32", "nvfp4", "mxfp4"],
)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("width", [96, 288])
def test_equals_the_dense_formulation(scheme: str, act_order: bool, width: int) -> None:
    options = Options(act_order=act_order, refine=0)
    weight, x = problem(3, in_features=width, tokens=4 * width)
    q = solve("gptq", weight, x, scheme, options)
    ours, reference = numerics.dequantize(q).double(), dense(weight, x, q, options)
    same = (ours - reference).abs() < 1e-5 * ours.abs().max()
    # a rounding tie decided differently by fp32 and fp64 changes the rest of that row: very few rows may differ
    assert same.all(1).float().mean() >= 0.9, f"{(~same.all(1)).sum()} rows differ"
    h = (x.T @ x).double()
    errors = [((m - weight.double()) @ h * (m - weight.double())).sum() for m in (ours, reference)]
    assert errors[0] <= errors[1] * 1.01


SHARES = {
    "int4-g32-sym": 0.7, "int3-g32-asym": 0.8, "int4-channel-sym": 0.7, "int2-g32-asym": 0.8, "int8-channel-sym": 0.7, "w8a8-int8": 0.7,
    "fp8-e4m3-channel": 0.75, "fp8-e4m3-tensor+fp8-e4m3-tensor-static": 0.75, "fp8-e4m3-block32": 0.75, "nf4-g32@u8/g256:f32": 0.75, "nvfp4": 0.75, "mxfp4": 0.75,
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "share"), SHARES.items())
def test_output_error_is_below_round_to_nearest(scheme: str, share: float) -> None:
    totals = {"rtn": 0.0, "gptq": 0.0}
    for seed in range(100):
        weight, x = problem(seed, 12, 64, 256)
        for name in totals:
            error = numerics.dequantize(solve(name, weight, x, scheme, Options(scale_search=False))) - weight
            totals[name] += float(((x @ error.T) ** 2).mean() / ((x @ weight.T) ** 2).mean())
    assert totals["gptq"] < share * totals["rtn"], totals


@pytest.mark.parametrize("tokens", [20, 400])
def test_the_correction_aims_at_the_outputs_of_the_unquantized_model(tokens: int) -> None:
    """Its target is the ridge regression of W y on x: min over V of |V x - W y|^2 + d |V - W|^2, in fp64 from the tokens themselves."""
    weight, x = problem(11, tokens=tokens)
    y = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.rand(96, generator=torch.Generator().manual_seed(2)))
    hessian, options = (x.double().T @ x.double()), Options(refine=0, scale_search=False)
    damping = options.damping * min(max(1, 8 * 96 / tokens), 100) * hessian.diagonal().mean()
    # rows of the augmented system: sqrt(d) V = sqrt(d) W beside V x = W y
    inputs = torch.cat((x.double(), damping.sqrt() * torch.eye(96).double()))
    outputs = torch.cat((y.double() @ weight.double().T, damping.sqrt() * weight.double().T))
    target = torch.linalg.lstsq(inputs, outputs).solution.T.float()
    stats, plain = Stats(len(x), x.T @ x, (y - x).T @ x), Stats(len(x), x.T @ x)
    gptq_method = find("gptq")
    assert gptq_method is not None
    scheme = parse("int8-channel-sym")
    corrected, wanted = gptq_method.quantize(weight, scheme, stats, options)[0], gptq_method.quantize(target, scheme, plain, options)[0]
    torch.testing.assert_close(corrected.scales, wanted.scales, rtol=1e-2, atol=0)
    assert float((numerics.dequantize(corrected) - numerics.dequantize(wanted)).norm()) < 0.02 * float((target - weight).norm())


def test_columns_that_calibration_never_excited_are_rounded_to_nearest() -> None:
    weight, x = problem(1)
    x[:, 40] = 0
    method = find("gptq")
    assert method is not None
    q, note = method.quantize(weight, parse("int4-g32-sym"), Stats(len(x), x.T @ x), Options())
    assert note is not None
    assert "1 inputs" in note
    assert ((numerics.dequantize(q)[:, 40] - weight[:, 40]).abs() <= q.scales[:, 1] * 0.5 + 1e-6).float().mean() > 0.9


def test_three_tokens_are_enough_for_a_sound_result() -> None:
    weight, x = problem(2, tokens=3)
    q = solve("gptq", weight, x, "int4-g32-sym", Options())
    rtn = solve("rtn", weight, x, "int4-g32-sym", Options())
    errors = [((x @ (numerics.dequantize(m) - weight).T) ** 2).sum() for m in (q, rtn)]
    assert torch.isfinite(numerics.dequantize(q)).all()
    assert errors[0] < errors[1]


def test_an_indefinite_hessian_ends_in_more_damping_or_rounding() -> None:
    weight, x = problem(4)
    hessian = x.T @ x
    hessian[0, 1] = hessian[1, 0] = hessian.diagonal().max() * 3
    method = find("gptq")
    assert method is not None
    q, note = method.quantize(weight, parse("int4-g32-sym"), Stats(len(x), hessian), Options())
    assert note is not None
    assert "damping raised" in note
    assert torch.isfinite(numerics.dequantize(q)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_and_activations_that_are_not_finite_are_refused(bad: float) -> None:
    weight, x = problem(5)
    with pytest.raises(NumericalError, match="NaN or infinite"):
        solve("gptq", weight.index_fill(1, torch.tensor([3]), bad), x, "int4-g32-sym", Options())
    with pytest.raises(NumericalError, match="activations"):
        solve("gptq", weight, x.index_fill(1, torch.tensor([3]), bad), "int4-g32-sym", Options())


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g32-asym", "int2-channel-asym", "int8-tensor-sym"])
def test_the_compiled_loops_equal_those_in_torch(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.module() is not None, "the native module was not built"
    for rows, width in ((1, 96), (17, 192), (40, 224)):
        weight, x = problem(6, rows, width, 800)
        compiled = solve("gptq", weight, x, scheme, Options())
        with monkeypatch.context() as patch:
            patch.setattr(native, "runs", lambda _: False)
            patch.setattr(gptq, "BLOCK", 7)
            reference = solve("gptq", weight, x, scheme, Options())
        same = (compiled.codes == reference.codes).all(1).float().mean()
        assert same >= 0.8, f"{same:.0%} of rows are equal; a rounding tie may change a row, not many"
        assert (compiled.scales == reference.scales).float().mean() > 0.98


def test_threads_do_not_change_a_bit() -> None:
    weight, x = problem(8, 100, 192, 800)
    before = torch.get_num_threads()
    results = []
    stats = Stats(len(x), x.T @ x)
    method = find("gptq")
    assert method is not None
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(method.quantize(weight, parse("int4-g32-sym"), stats, Options())[0])
    torch.set_num_threads(before)
    assert results[0].equals(results[1])
    assert results[0].equals(results[2])


def test_shared_statistics_are_factorized_once() -> None:
    weight, x = problem(7)
    stats = Stats(len(x), x.T @ x)
    method = find("gptq")
    assert method is not None
    first = method.quantize(weight, parse("int4-g32-sym"), stats, Options())[0]
    factor = next(iter(stats.factors.values()))
    second = method.quantize(weight, parse("int4-g32-sym"), stats, Options())[0]
    assert next(iter(stats.factors.values())) is factor
    assert first.equals(second)
