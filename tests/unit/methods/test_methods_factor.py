"""The factor made in place equals the textbook's: invert, factorize, permute, all in fp64."""

from __future__ import annotations

import pytest
import torch

from qforge.methods import Options, Stats, factor, gptq


@pytest.mark.parametrize(("width", "panel"), [(1, 512), (50, 16), (64, 16), (97, 512), (130, 7)])
@pytest.mark.parametrize("chunk", [1 << 20, 1000])
def test_equals_inverting_and_factorizing_again(width: int, panel: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "PANEL", panel)
    monkeypatch.setattr(factor, "_CHUNK", chunk)
    g = torch.Generator().manual_seed(width)
    x = torch.randn(3 * width, width, generator=g)
    hessian, order = x.T @ x, torch.randperm(width, generator=g)
    before = hessian.clone()
    diagonal = hessian.diagonal() * 1.1 + 0.5
    damped = hessian.double()
    damped.diagonal().copy_(diagonal)
    want = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True).T
    got = factor.inverse_factor(hessian, order, diagonal)
    assert got is not None
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    assert torch.equal(hessian, before)


def test_an_indefinite_matrix_has_none() -> None:
    hessian = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert factor.inverse_factor(hessian, torch.arange(2), hessian.diagonal()) is None
    assert factor.inverse_factor(torch.full((2, 2), float("nan")), torch.arange(2), torch.ones(2)) is None


def test_fp32_is_enough_where_it_is_used_and_fp64_is_taken_elsewhere() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 100, generator=g) * torch.logspace(0, 3, 100)  # variances from 1 to a million
    stats = Stats(400, hessian=x.T @ x)
    for damping, tolerance in ((0.2, 1e-3), (1e-7, 0.0)):
        got = gptq._factorize(stats.hessian, 4000, Options(damping=damping))
        exact = factor.inverse_factor(stats.hessian, got.order, got.diagonal)
        assert got.lower is not None
        assert exact is not None
        difference = float((got.lower - exact).norm() / exact.norm())
        assert difference <= tolerance
        assert (difference > 0) == (tolerance > 0)
