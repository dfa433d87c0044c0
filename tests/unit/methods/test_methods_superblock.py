"""The search over block types, against dense searches in fp64, and what it does with odd weights."""

from __future__ import annotations

import pytest
import torch

from qforge.errors import NumericalError
from qforge.methods import superblock
from qforge.superblocks import TYPES


def weighted_error(weight, importance, kind):
    values = superblock.quantize(weight, importance, kind).values().view(weight.shape)
    return ((values - weight).double().square() * importance.double()).sum()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0"])
def test_groups_with_one_scale_are_as_good_as_a_dense_search(kind):
    g = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(40, 32, generator=g), torch.randn(32, generator=g).exp()
    low, high = TYPES[kind].codes
    x, h = weight.double(), importance.double()
    best = torch.full((40,), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.6, 1.4, 4001, dtype=torch.float64):
        for sign in (-1, 1):
            scale = sign * share * x.abs().amax(1, keepdim=True) / -low
            codes = (x / scale).round().clamp(low, high)
            scale = ((x * codes * h).sum(1) / (codes.square() * h).sum(1))[:, None]
            best = best.minimum(((x - scale * codes).square() * h).sum(1))
    assert weighted_error(weight, importance, kind) < 1.005 * best.sum()


@pytest.mark.parametrize("kind", [k for k, t in TYPES.items() if t.scales is not None])
def test_a_block_that_the_type_holds_exactly_stays_exact(kind):
    t, g = TYPES[kind], torch.Generator().manual_seed(1)
    codes = torch.randint(t.codes[0], t.codes[1] + 1, (4, t.groups, t.group), generator=g)
    codes[..., 0], codes[..., 1] = t.codes  # the whole range, so that no smaller scale would do
    scales = torch.randint(max(1, t.scales[1] // 2), t.scales[1] + 1, (4, t.groups, 1), generator=g)
    scales[:, 0] = t.scales[0] if t.scales[0] < 0 else t.scales[1]
    weight = 0.0625 * scales * codes
    if t.minimum:
        minima = torch.randint(1, t.scales[1] + 1, (4, t.groups, 1), generator=g)
        minima[:, 0] = t.scales[1]
        weight = weight - 0.125 * minima
    weight = weight.view(4, 256).float()
    found = superblock.quantize(weight, None, kind).values().view(4, 256)
    assert (found - weight).norm() < 0.02 * weight.norm() / 2 ** (t.codes[1] - t.codes[0] > 3)


@pytest.mark.parametrize("kind", TYPES)
def test_zeros_constants_and_unseen_inputs(kind):
    zeros = superblock.quantize(torch.zeros(2, 256), torch.zeros(256), kind)
    assert (zeros.values() == 0).all()
    steps = TYPES[kind].codes[1] - TYPES[kind].codes[0]
    for constant in (0.3, -0.3):
        assert (superblock.quantize(torch.full((2, 256), constant), None, kind).values() - constant).abs().max() < 0.3 / steps
    weight = torch.randn(2, 256, generator=torch.Generator().manual_seed(2))
    importance = torch.zeros(256)
    importance[::2] = 1.0
    values = superblock.quantize(weight, importance, kind).values().view(2, 256)
    spread = weight.view(2, -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert ((values - weight).abs() <= 2.5 * spread).all()  # what calibration never saw is still near


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_weights_that_no_block_holds_are_refused(kind):
    with pytest.raises(NumericalError, match="NaN"):
        superblock.quantize(torch.full((1, 256), torch.nan), None, kind)
    for size in (1e9, 1e30):
        with pytest.raises(NumericalError, match="ends at 65504"):
            superblock.quantize(torch.linspace(-size, size, 256)[None], None, kind)


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K"])
def test_importance_decides_where_the_error_goes(kind):
    g = torch.Generator().manual_seed(4)
    weight, importance = torch.randn(16, 256, generator=g), torch.randn(256, generator=g).mul(2).exp()
    plain = superblock.quantize(weight, None, kind).values().view(weight.shape)
    assert weighted_error(weight, importance, kind) < 0.9 * ((plain - weight).double().square() * importance).sum()


def test_chunks_do_not_matter(monkeypatch):
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(5))
    whole = superblock.quantize(weight, None, "Q4_K")
    monkeypatch.setattr(superblock, "_CHUNK", 1024)
    assert superblock.quantize(weight, None, "Q4_K").equals(whole)
