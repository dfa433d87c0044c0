"""The search for scales gives the same bits compiled and in PyTorch, whose own sums would depend on the device."""

from __future__ import annotations

import pytest
import torch

from qforge.methods import native, scales
from qforge.scheme import parse


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g128-asym", "int3-channel-sym", "int4-channel-asym@f32", "int4-g24-asym@f32", "int2-g8-sym"])
@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_and_plain_searches_agree_bit_for_bit(text: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.module() is not None, "the native module was not built"
    g = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(60, 384, generator=g), torch.rand(384, generator=g) if weighted else None
    compiled = scales.choose(weight, parse(text), importance, True)
    monkeypatch.setattr(native, "runs", lambda scheme: False)
    plain = scales.choose(weight, parse(text), importance, True)
    assert torch.equal(compiled[0], plain[0])
    assert compiled[1] is plain[1] is None or (compiled[1] is not None and plain[1] is not None and torch.equal(compiled[1], plain[1]))


@pytest.mark.parametrize("text", ["int4-tensor-sym", "fp8-e4m3-block128"])
def test_sums_of_many_terms_are_sums(text: str) -> None:
    """Of blocks and whole tensors, by halves: the least error is that of the grid's best."""
    scheme, weight = parse(text), torch.randn(130, 200, generator=torch.Generator().manual_seed(1))
    terms = weight.square().view(1, 1, -1)
    assert torch.allclose(scales._sum_of_halves(terms)[0, 0], terms.double().sum().float(), rtol=1e-6)
    chosen, _ = scales.choose(weight, scheme, None, True)
    assert chosen.shape == scheme.scale_shape(130, 200)
