"""What is summed of a linear's inputs is what a plain computation over all of them gives."""

from __future__ import annotations

import pytest
import torch

from qforge.calibration import statistics
from qforge.calibration.originals import Originals
from qforge.calibration.room import Room
from qforge.calibration.statistics import Sums, difference


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_peak_is_that_of_all_batches_together(scale: float) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [scale * torch.randn(2, n, 48, generator=g) for n in (5, 64, 1)]
    batches[1][0, 3, 7] = -400 * scale
    sums = Sums(frozenset(), 48)
    for batch in batches:
        sums.add(batch)
    whole = torch.cat([b.reshape(-1, 48) for b in batches]).double()
    assert sums.stats().peak == pytest.approx(float(whole.abs().max() / whole.square().mean().sqrt()), rel=1e-5)


def test_nothing_and_zeros_have_no_peak() -> None:
    for batches in ([], [torch.zeros(0, 48)], [torch.zeros(3, 48)]):
        sums = Sums(frozenset(), 48)
        for batch in batches:
            sums.add(batch)
        assert sums.stats().peak is None


def test_inputs_beyond_fp16_beside_originals_within_it() -> None:
    """The unquantized model's inputs are kept in fp16 where they fit; those of the quantized one may be larger."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    x[3, 4], y[3, 4] = 70000.0, 60000.0
    sums = Sums(frozenset({"hessian", "cross"}), 32)
    sums.add(x, y.half())
    cross = sums.stats().cross
    assert cross is not None
    expected = torch.zeros(32, 32)
    expected[4] = -10000 * x[3]
    torch.testing.assert_close(cross, expected, rtol=0.01, atol=1.0)
    assert torch.equal(cross[5], torch.zeros(32))  # equal inputs have no difference


def test_a_token_that_only_the_quantized_stream_sends_to_an_expert_counts_as_right_beyond_fp16() -> None:
    room, rows = Room(), torch.tensor([1, 2])
    found = Originals.__new__(Originals)
    found._kept = {("e", 0): (room.copy(torch.ones(2, 8)), torch.tensor([0, 1]))}
    x = torch.full((2, 8), 3.0)
    x[1, 3] = 70000.0
    wanted = found.take("e", 0, x, rows)
    assert wanted is not None
    assert torch.equal(difference(wanted, x), torch.stack([torch.full((8,), -2.0), torch.zeros(8)]))


def test_a_hessian_wider_than_its_tiles_is_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "COLUMNS", 16)
    x = torch.randn(100, 56, generator=torch.Generator().manual_seed(0))
    sums = Sums(frozenset({"hessian"}), 56)
    for part in x.split(30):
        sums.add(part)
    hessian = sums.stats().hessian
    assert hessian is not None
    torch.testing.assert_close(hessian.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(hessian, hessian.T)
