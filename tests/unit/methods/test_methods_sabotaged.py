"""Sabotaged weights and inputs, every method and transform: a sound, finite result, not worse than rounding to nearest where that is claimed, or a refusal that names the layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from qforge import numerics
from qforge.calibration.linear import quantize_linear
from qforge.calibration.statistics import Sums
from qforge.errors import NumericalError
from qforge.methods import Options, Stats, find, find_transforms
from qforge.methods.transform import Reader, scaled
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse
from qforge.types import LayerResult

O, I = 48, 64  # noqa: E741  # output and input features
SCHEMES = (
    "int4-g32-sym", "int4-g32-asym", "int2-channel-asym", "int8-channel-sym", "int4-g32-sym@f32", "w8a8-int8", "int8-channel-sym+int8-tensor-static", "fp8-dynamic",
    "fp8-e4m3-tensor+fp8-e4m3-tensor-static", "fp8-e4m3-block32", "nf4", "nvfp4", "mxfp4", "int4-g32-offset@u6/g64:f16",
)  # fmt: skip
METHODS = ["rtn", "gptq", "fp8", "nf4", "awq", "smoothquant", "awq gptq", "smoothquant gptq"]
COLUMNS, ROWS = torch.arange(I), torch.arange(O)
Problem = tuple[torch.Tensor, torch.Tensor | None]


def ordinary() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    mix = torch.randn(I, I, generator=g) / I**0.5 + torch.eye(I)
    return torch.randn(O, I, generator=g) / 8, torch.randn(600, I, generator=g) @ mix * torch.linspace(0.2, 2, I)


def spoiled(t: torch.Tensor, value: float) -> torch.Tensor:
    return t.index_put((torch.tensor(4), torch.tensor(9)), torch.tensor(value))


SOUND: dict[str, Callable[[torch.Tensor, torch.Tensor], Problem]] = {
    "nothing": lambda w, x: (w, x),
    "a dead channel": lambda w, x: (w, x * (COLUMNS != 7)),
    "dead inputs": lambda w, x: (w, x * 0),
    "a channel of 1e4": lambda w, x: (w, x * torch.where(COLUMNS == 3, 1e4, 1.0)),
    "constant inputs": lambda w, x: (w, torch.full_like(x, 0.5)),
    "a constant channel": lambda w, x: (w, torch.where(COLUMNS == 5, torch.tensor(3.0), x)),
    "equal channels": lambda w, x: (w, x[:, COLUMNS // 2]),
    "three tokens": lambda w, x: (w, x[:3]),
    "one token": lambda w, x: (w, x[:1]),
    "a zero weight": lambda w, x: (w * 0, x),
    "zero rows": lambda w, x: (w * (ROWS % 3 != 0)[:, None], x),
    "one weight that is not zero": lambda w, x: (spoiled(w * 0, 0.3), x),
    "a weight of 1e4": lambda w, x: (spoiled(w, 1e4), x),
    "weights of 1e-12": lambda w, x: (w * 1e-12, x),
    "denormal weights": lambda w, x: (w * 1e-40, x),
    "inputs beyond fp16": lambda w, x: (w, x * 1e5),
    "inputs of 1e-25": lambda w, x: (w, x * 1e-25),
}
OVERFLOWING: dict[str, Callable[[torch.Tensor, torch.Tensor], Problem]] = {  # sound in a wide scale type, else refused
    "scales beyond fp16": lambda w, x: (w * 1e7, x),
    "squares beyond fp32": lambda w, x: (w * 1e30, x),
    "weights at the end of fp32": lambda w, x: (w.sign() * 3e38, x),
    "inputs at the end of fp32": lambda w, x: (w, x * 1e17),
    "no token": lambda w, x: (w, None),  # static activation scales are refused
}
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Problem]] = {
    "an infinite weight": lambda w, x: (spoiled(w, math.inf), x),
    "a weight that is no number": lambda w, x: (spoiled(w, math.nan), x),
    "an infinite input": lambda w, x: (w, spoiled(x, math.inf)),
    "an input that is no number": lambda w, x: (w, spoiled(x, math.nan)),
    "inputs whose squares overflow": lambda w, x: (w, x * 1e20),
}


def schemes_for(method: str) -> list[str]:
    chain = method.split()
    quantizer, transforms = find(chain), find_transforms(chain)
    assert quantizer is not None
    return [s for s in SCHEMES if quantizer.supports(parse(s)) is None and all(t.supports(parse(s)) is None for t in transforms)]


def gather(x: torch.Tensor) -> Stats:
    sums = Sums(frozenset({"hessian", "cross", "absmax", "sample"}), I)
    for part in x.split(100):
        sums.add(part, part * 1.01)
    return sums.stats()


def solve(method: str, scheme: Scheme, weight: torch.Tensor, x: torch.Tensor | None) -> tuple[QuantizedLinear, LayerResult, torch.Tensor]:
    """As the block loop does it: factors of all transforms, then the weight that they leave; the factors are the third value."""
    quantizer, factors, options = find(method.split()), torch.ones(I), Options(error_correction=False)
    assert quantizer is not None
    stats = None if x is None else gather(x)
    for transform in find_transforms(method.split()) if stats is not None else ():
        assert stats is not None
        factors = factors * transform.factors([Reader(weight * factors, scheme)], scaled(stats, factors), COLUMNS, I, options)
    assert factors.isfinite().all()
    assert (factors > 0).all()
    if stats is not None:
        stats = replace(scaled(stats, factors), cross=None)
    q, layer = quantize_linear("the.layer", weight * factors, scheme, quantizer, stats, options)
    return q, layer, factors


def check_sound(q: QuantizedLinear, layer: LayerResult, what: str) -> None:
    assert numerics.dequantize(q).isfinite().all(), what
    assert (q.scales.isfinite() & (q.scales > 0)).all(), what
    assert q.input_scale is None or (q.input_scale.isfinite() & (q.input_scale > 0)).all(), what
    assert math.isfinite(layer.relative_error or 0.0), what
    assert math.isfinite(layer.output_error or 0.0), what


def output_error(q: QuantizedLinear, factors: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, inputs: bool) -> float:
    """Frobenius norm, with rounded `inputs` or without."""
    rounded = numerics.quantize_activations(x / factors, q.scheme, q.input_scale) if inputs else x / factors
    return float((rounded.double() @ numerics.dequantize(q).double().T - x.double() @ weight.double().T).norm())


@pytest.mark.parametrize("case", SOUND)
@pytest.mark.parametrize("method", METHODS)
def test_a_sound_result(method: str, case: str) -> None:
    weight, x = SOUND[case](*ordinary())
    assert x is not None
    for text in schemes_for(method):
        q, layer, factors = solve(method, parse(text), weight, x)
        check_sound(q, layer, text)
        if case in ("a zero weight", "dead inputs"):
            assert layer.output_error in (None, 0.0)
        if "gptq" in method:
            plain, _, ones = solve("rtn", parse(text), weight, x)
            inputs = "awq" not in method  # AWQ chooses factors by the weights' rounding alone
            errors = output_error(q, factors, weight, x, inputs), output_error(plain, ones, weight, x, inputs)
            assert errors[0] <= 1.02 * errors[1] + 1e-9 * float((x.double() @ weight.double().T).norm()), (text, errors)


@pytest.mark.parametrize("case", OVERFLOWING)
@pytest.mark.parametrize("method", METHODS)
def test_a_sound_result_or_a_refusal_that_names_the_layer(method: str, case: str) -> None:
    weight, x = OVERFLOWING[case](*ordinary())
    for text in schemes_for(method):
        holds = text.endswith("@f32") and case in ("scales beyond fp16", "squares beyond fp32")
        try:
            q, layer, _ = solve(method, parse(text), weight, x)
        except NumericalError as e:
            assert str(e).startswith("the.layer: ") or find_transforms(method.split()), text  # noqa: PT017  # it may be raised, or not; a transform's is named by the block loop
            assert not holds, text
            continue
        check_sound(q, layer, text)
        if holds:
            usual = solve(method, parse(text), ordinary()[0], x)[1].relative_error
            assert layer.relative_error == pytest.approx(usual, rel=0.5)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", METHODS)
def test_a_refusal(method: str, case: str) -> None:
    weight, x = REFUSED[case](*ordinary())
    for text in schemes_for(method):
        with pytest.raises(NumericalError, match=r"NaN or infinite|does not fit|beyond fp32|no scale"):
            solve(method, parse(text), weight, x)
