"""What is summed of a linear's inputs is what a plain computation over all of them gives."""

from __future__ import annotations

import pytest
import torch

from qforge.calibration.statistics import Sums


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
