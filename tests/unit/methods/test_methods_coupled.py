"""Descent with outputs weighed against each other, against dense fp64 formulations and brute force."""

import itertools
from dataclasses import replace

import pytest
import torch

from qforge import numerics
from qforge.errors import NumericalError
from qforge.methods import coupled, native, scales
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse


def problem(seed: int, scheme: Scheme, out_features: int = 24, in_features: int = 64) -> tuple[torch.Tensor, QuantizedLinear, torch.Tensor, torch.Tensor]:
    """A weight, its plain rounding, a correlated Hessian and correlated outputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(200, in_features, generator=generator) @ torch.randn(in_features, in_features, generator=generator)
    g = torch.randn(100, 5, generator=generator) @ torch.randn(5, out_features, generator=generator)
    scale, zero = scales.choose(weight, scheme, None, True)
    return weight, numerics.quantize(weight, scheme, scale, zero), x.T @ x / 200, coupled.damped(g.T @ g / 100)


def error(weight: torch.Tensor, q: QuantizedLinear, hessian: torch.Tensor, outputs: torch.Tensor) -> float:
    e = (weight - numerics.dequantize(q)).double()
    return float(torch.einsum("op,pi,ij,oj->", outputs.double(), e, hessian.double(), e))


SCHEMES = [parse(s) for s in ("int4-g32-sym", "int4-g16-asym", "int3-channel-sym", "int2-g32-asym", "int8-g32-sym@f32")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_sweep_makes_the_weighed_error_smaller(scheme: Scheme) -> None:
    weight, q, hessian, outputs = problem(0, scheme)
    errors = [error(weight, coupled.refine(weight, q, hessian, outputs, sweeps), hessian, outputs) for sweeps in range(4)]
    assert errors[1] < 0.9 * errors[0]
    assert all(after <= before * 1.00001 for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_no_single_code_could_be_better_where_the_descent_ends(scheme: Scheme) -> None:
    weight, q, hessian, outputs = problem(1, scheme, 8, 32)
    q = coupled.refine(weight, q, hessian, outputs, 60)
    least = error(weight, q, hessian, outputs)
    low, high = scheme.code_range
    for o in range(8):
        for i in range(32):
            for step in (-1, 1):
                if low <= int(q.codes[o, i]) + step <= high:
                    moved = q.codes.clone()
                    moved[o, i] += step
                    assert error(weight, QuantizedLinear(scheme, moved, q.scales, q.zeros), hessian, outputs) >= least * 0.9999


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_native_loops_and_the_plain_ones_agree(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, q, hessian, outputs = problem(2, scheme, 10, 48 if scheme.granularity.columns == 16 else 32)
    fast = coupled.refine(weight, q, hessian, outputs, 2)
    monkeypatch.setattr(native, "module", lambda: None)
    plain = coupled.refine(weight, q, hessian, outputs, 2)
    assert error(weight, fast, hessian, outputs) == pytest.approx(error(weight, plain, hessian, outputs), rel=0.02)  # ties that rounding decides lead elsewhere
    assert (fast.codes != plain.codes).float().mean() < 0.05


def test_more_than_one_run_of_columns_is_pushed_on() -> None:
    scheme = parse("int4-g32-sym")
    weight, q, hessian, outputs = problem(3, scheme, 16, 3 * coupled.COLUMNS - 32)
    refined = coupled.refine(weight, q, hessian, outputs, 1)
    in_one = pytest.MonkeyPatch()
    in_one.setattr(coupled, "COLUMNS", 1024)
    whole = coupled.refine(weight, q, hessian, outputs, 1)
    in_one.undo()
    assert error(weight, refined, hessian, outputs) == pytest.approx(error(weight, whole, hessian, outputs), rel=1e-2)
    assert (refined.codes != whole.codes).float().mean() < 0.02


@pytest.mark.parametrize("by_native", [True, False])
@pytest.mark.parametrize("text", ["int4-g16-sym", "int4-channel-sym"])
def test_an_output_alone_becomes_what_it_becomes_beside_one_that_has_nothing_to_do_with_it(text: str, by_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_native:
        monkeypatch.setattr(native, "runs", lambda scheme: False)
    weight, q, hessian, _ = problem(5, parse(text), 2, 272)
    both = coupled.refine(weight, q, hessian, torch.eye(2), 2)
    for row in range(2):
        here = slice(row, row + 1)
        one = coupled.refine(weight[here], replace(q, codes=q.codes[here], scales=q.scales[here]), hessian, torch.ones(1, 1), 2)
        of_both = error(weight[here], replace(both, codes=both.codes[here], scales=both.scales[here]), hessian, torch.ones(1, 1))
        assert error(weight[here], one, hessian, torch.ones(1, 1)) == pytest.approx(of_both, rel=1e-2)


def test_outputs_that_count_alike_give_the_plain_descents_optimum() -> None:
    scheme = parse("int4-g32-sym")
    weight, q, hessian, _ = problem(4, scheme)
    alike = coupled.refine(weight, q, hessian, torch.eye(24), 1)
    by_row = [coupled.refine(weight[o : o + 1], QuantizedLinear(scheme, q.codes[o : o + 1], q.scales[o : o + 1]), hessian, torch.eye(1), 1) for o in range(24)]
    assert torch.equal(alike.codes, torch.cat([r.codes for r in by_row]))


def test_weighing() -> None:
    assert torch.equal(coupled.damped(torch.zeros(3, 3)), torch.eye(3))
    assert torch.allclose(coupled.damped(torch.diag(torch.tensor([0.0, 2.0, 4.0]))), torch.diag(torch.tensor([0.3, 1.3, 2.3])))
    with pytest.raises(NumericalError, match="gradients"):
        coupled.damped(torch.tensor([[torch.inf]]))
