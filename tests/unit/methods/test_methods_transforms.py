"""Factors: finite whatever the input is, shared where channels are shared, and chosen by an error that dense fp64 arithmetic confirms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qforge import numerics
from qforge.calibration.statistics import SAMPLE, Sums
from qforge.errors import NumericalError, UnsupportedError
from qforge.methods import Options, Stats, find, find_transforms, scales
from qforge.methods.awq import AWQ
from qforge.methods.smoothquant import SmoothQuant
from qforge.methods.transform import Reader, Transform
from qforge.scheme import Scheme, parse

W8A8, STATIC, INT4 = parse("w8a8-int8"), parse("int8-channel-sym+int8-tensor-static"), parse("int4-g32-sym")
IDENTITY = torch.arange(64)


def inputs(tokens: int = 600, outlier: float = 40.0) -> torch.Tensor:
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.2, 2, 64)
    x[:, 5] *= outlier
    return x


def weight(rows: int = 48, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) / 8


def stats_of(x: torch.Tensor) -> Stats:
    sums = Sums(frozenset({"hessian", "absmax", "sample"}), x.shape[1])
    for part in x.split(100):
        sums.add(part)
    return sums.stats()


def output_error(x: torch.Tensor, w: torch.Tensor, scheme: Scheme, factors: torch.Tensor, search: bool) -> float:
    importance = (x / factors).square().sum(0) if search else None
    q = numerics.quantize(w * factors, scheme, *scales.choose(w * factors, scheme, importance, search=search))
    scale = numerics.activation_scale((x / factors).abs().max(), scheme.activations.number) if scheme.activations is not None else None
    rounded = numerics.quantize_activations(x / factors, scheme, scale)
    return float((rounded.double() @ numerics.dequantize(q).double().T - x.double() @ w.double().T).norm())


@pytest.mark.parametrize("scheme", [W8A8, STATIC])
def test_smoothquant_lowers_the_output_error_of_an_outlier_channel(scheme: Scheme) -> None:
    x, w = inputs(), weight()
    factors, best = (SmoothQuant().factors([Reader(w, scheme)], stats_of(x), IDENTITY, 64, Options(smoothing=a)) for a in (0.5, None))
    before, after, least = (output_error(x, w, scheme, s, False) for s in (torch.ones(64), factors, best))
    assert after < before / 2
    assert least < 1.02 * after  # chosen by errors relative to each token's output, over a sample
    paper = x.abs().amax(0).sqrt() / w.abs().amax(0).sqrt()
    torch.testing.assert_close(factors / factors[0], paper / paper[0])


def test_smoothquant_leaves_alone_what_it_would_make_worse() -> None:
    x, w = inputs(), weight()
    w[:, 5] *= 40
    assert torch.equal(SmoothQuant().factors([Reader(w, W8A8)], stats_of(x), IDENTITY, 64, Options(smoothing=1.0)), torch.ones(64))


def test_awq_chooses_the_ratio_with_the_smallest_output_error() -> None:
    x, first, second = inputs(outlier=30), weight(), weight(32, 2)
    readers = [Reader(first, INT4), Reader(second, INT4)]
    factors = AWQ().factors(readers, stats_of(x), IDENTITY, 64, Options())
    strength = x.square().mean(0).sqrt()

    def error(s: torch.Tensor) -> float:
        return sum(output_error(x, r.weight, r.scheme, s, True) ** 2 for r in readers)

    grid = [error(strength ** (i / 20)) for i in range(20)]
    assert error(factors) == pytest.approx(min(grid), rel=0.02)
    assert error(factors) < 0.97 * grid[0]


@pytest.mark.parametrize("transform", [AWQ(), SmoothQuant()], ids=["awq", "smoothquant"])
@pytest.mark.parametrize("case", ["dead inputs", "one dead input", "zero weight", "huge", "three tokens", "constant"])
def test_factors_are_finite_and_positive(transform: Transform, case: str) -> None:
    x, w = inputs(), weight()
    x, w = {
        "dead inputs": (torch.zeros_like(x), w),
        "one dead input": (x * (IDENTITY != 7), w),
        "zero weight": (x, torch.zeros_like(w)),
        "huge": (x * torch.where(IDENTITY == 3, 1e4, 1.0), w),
        "three tokens": (x[:3], w),
        "constant": (torch.full_like(x, 0.5), w),
    }[case]
    for scheme in (STATIC, INT4) if transform.name == "awq" else (STATIC, W8A8):
        factors = transform.factors([Reader(w, scheme)], stats_of(x), IDENTITY, 64, Options())
        assert factors.isfinite().all()
        assert (factors > 0).all()
        assert case != "one dead input" or factors[7] == 1


@pytest.mark.parametrize("transform", [AWQ(), SmoothQuant()], ids=["awq", "smoothquant"])
def test_columns_of_one_channel_share_a_factor_and_others_have_none(transform: Transform) -> None:
    columns = torch.cat((torch.arange(16), torch.arange(16), torch.arange(16) + 20, torch.full((16,), -1)))
    factors = transform.factors([Reader(weight(), STATIC)], stats_of(inputs()), columns, 40, Options())
    assert factors.shape == (40,)
    assert torch.equal(factors[16:20], torch.ones(4))
    assert torch.equal(factors[36:], torch.ones(4))
    assert (factors != 1).any()


@pytest.mark.parametrize("transform", [AWQ(), SmoothQuant()], ids=["awq", "smoothquant"])
def test_activations_that_overflow_are_refused(transform: Transform) -> None:
    x = inputs()
    x[3, 4] = float("inf")
    with pytest.raises(NumericalError, match="overflows on this text"):
        transform.factors([Reader(weight(), STATIC)], stats_of(x), IDENTITY, 64, Options())


def test_a_sample_is_evenly_spaced_and_bounded() -> None:
    sums = Sums(frozenset({"sample"}), 1)
    for part in torch.arange(16_384.0).view(-1, 1).split(1024):
        sums.add(part)
    sample = sums.stats().sample
    assert sample is not None
    assert SAMPLE / 2 <= len(sample) <= SAMPLE
    assert sample.flatten().diff().min() > 0
    assert sample.flatten().diff().max() <= 128
    assert 1 <= (sample % 512 == 0).sum() <= 3  # first tokens of windows: as rare as in the text


def test_methods_are_found_by_what_a_recipe_names() -> None:
    assert [t.name for t in find_transforms(("awq", "smoothquant", "gptq"))] == ["awq", "smoothquant"]
    assert find_transforms("gptq") == ()
    for chain, name in {("awq",): "awq", ("smoothquant", "gptq"): "gptq", ("awq", "rtn"): "rtn"}.items():
        quantizer = find(chain)
        assert quantizer is not None
        assert quantizer.name == name
    with pytest.raises(UnsupportedError, match="hqq"):
        find(["awq", "hqq"])


def test_awq_alone_rounds_with_searched_ranges() -> None:
    x, w = inputs(), weight()
    found = [find(name) for name in ("awq", "rtn")]
    errors = []
    for quantizer in found:
        assert quantizer is not None
        q, _ = quantizer.quantize(w, INT4, stats_of(x), Options())
        errors.append(float((x @ (numerics.dequantize(q) - w).T).norm()))
    assert errors[0] < errors[1]


def test_rounding_to_nearest_searches_its_scales_below_eight_bits() -> None:
    quantizer = find("rtn")
    assert quantizer is not None
    w = weight() ** 3
    errors = {}
    for text in ("int4-g32-sym", "int3-g32-asym", "nvfp4", "int8-channel-sym", "fp8-e4m3-channel"):
        for search in (True, False):
            q, _ = quantizer.quantize(w, parse(text), None, Options(scale_search=search))
            errors[text, search] = float((numerics.dequantize(q) - w).norm())
        assert quantizer.needs(Options()) == frozenset()
    for text in ("int4-g32-sym", "int3-g32-asym", "nvfp4"):
        assert errors[text, True] < 0.98 * errors[text, False]
    for text in ("int8-channel-sym", "fp8-e4m3-channel"):
        assert errors[text, True] == errors[text, False]


@pytest.mark.parametrize("search", [True, False])
def test_awq_chooses_for_the_rounding_that_follows(monkeypatch: pytest.MonkeyPatch, search: bool) -> None:
    seen: list[bool] = []
    choose = scales.choose

    def spy(*args: Any, search: bool) -> Any:
        seen.append(search)
        return choose(*args, search=search)

    monkeypatch.setattr("qforge.methods.awq.scales.choose", spy)
    AWQ().factors([Reader(torch.randn(8, 64), INT4)], stats_of(torch.randn(100, 64)), IDENTITY, 64, Options(scale_search=search))
    assert set(seen) == {search}


def test_smoothquant_is_not_led_by_one_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's first token may be a hundred times larger than the others, in other channels."""
    x, w = inputs(), weight()
    x[0] = 0
    x[0, 9:40] = 3000 * torch.randn(31, generator=torch.Generator().manual_seed(3))
    stats, reader = stats_of(x), Reader(w, W8A8)
    assert stats.sample is not None
    both = SmoothQuant().factors([reader], stats, IDENTITY, 64, Options())
    monkeypatch.setattr("qforge.methods.smoothquant._typical", lambda sample: sample.abs().amax(0))
    largest = SmoothQuant().factors([reader], stats, IDENTITY, 64, Options())
    error, others = [output_error(x[1:], w, W8A8, factors, False) for factors in (both, largest)], output_error(x[1:], w, W8A8, torch.ones(64), False)
    assert error[0] < 0.9 * error[1]
    assert error[0] < 0.9 * others
