"""Law 1: parse(str(scheme)) == scheme. Law 2: every RTN code is the nearest representable one given the final scales, by brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qforge import numerics
from qforge.errors import NumericalError, RecipeError
from qforge.methods import Options, Quantizer, find
from qforge.scheme import PRESETS, ActivationScheme, Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry, parse

groups = st.builds(lambda n: Granularity(Per.GROUP, n, 1), st.integers(1, 4096))
blocks = st.builds(lambda r, c: Granularity(Per.BLOCK, c, r), st.integers(1, 512), st.integers(1, 512))
plain = st.sampled_from([Granularity(Per.TENSOR), Granularity(Per.CHANNEL)])
scales = st.one_of(st.builds(ScaleFormat, st.sampled_from(ScaleType)), st.builds(ScaleFormat, st.sampled_from(ScaleType), st.one_of(groups, plain), st.sampled_from(ScaleType)))
activations = st.builds(ActivationScheme, st.sampled_from(Number), st.one_of(groups, st.sampled_from([Granularity(Per.TENSOR), Granularity(Per.TOKEN)])), st.booleans())


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    number = draw(st.sampled_from(Number))
    symmetry = draw(st.sampled_from(Symmetry)) if number.is_int else Symmetry.SYM
    return Scheme(number, draw(st.one_of(groups, blocks, plain)), symmetry, draw(scales), draw(st.none() | activations))


@given(schemes())
def test_text_form_round_trips(scheme: Scheme) -> None:
    assert parse(str(scheme)) == scheme


@pytest.mark.parametrize("name", PRESETS)
def test_presets_parse(name: str) -> None:
    assert parse(name) == parse(PRESETS[name])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int4",
        "int4-g64",
        "int5-g31-maybe",
        "int9-g64-sym",
        "int4-g0-sym",
        "fp8-e4m3-channel-sym",
        "int4-token-sym",
        "int4-g64-sym+int8",
        "int4-g64-sym+int8-channel",
        "INT4-g64-sym",
    ],
)
def test_what_is_no_scheme_is_refused_with_help(text: str) -> None:
    with pytest.raises(RecipeError, match="is not a scheme"):
        parse(text)


RTN_SCHEMES = ["int2-g8-sym", "int3-g8-asym", "int4-g8-sym", "int4-g16-asym", "int4-g8-offset", "int4-channel-sym", "int4-tensor-asym",
               "int5-g8-sym", "int6-g16-asym", "int8-g16-sym", "int8-channel-asym", "int8-channel-sym@f32", "fp8-e4m3-channel", "fp8-e4m3-block8", "fp8-e5m2-tensor", "nf4-g16",
               "fp4-e2m1-g16@e8m0", "fp4-e2m1-g16@e4m3", "nf4-g4@u8/g8:f32", "fp4-e2m1-g8@e4m3/tensor:f32", "int4-g4-sym@u6/g16:f16",
               "int4-g8-asym@u6/g16:f16", "int4-g4-offset@u6/g8:f16", "int8-channel-sym+int8-token", "fp8-e4m3-block8+fp8-e4m3-g8"]  # fmt: skip


def _rtn() -> Quantizer:
    found = find("rtn")
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RTN_SCHEMES), st.integers(0, 2**31), st.floats(1e-5, 100))
@example("int8-channel-sym@f32", 1, 1.0)  # such a tie
def test_rtn_codes_are_the_nearest(text: str, seed: int, magnitude: float) -> None:
    scheme = parse(text)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * magnitude
    q, _ = _rtn().quantize(weight, scheme, None, Options())
    exact = weight.double()
    got = (numerics.dequantize(q).double() - exact).abs()
    low, high = scheme.code_range
    candidates = torch.stack([
        numerics.decode(torch.full_like(q.codes, c), numerics.expand(q.scales, scheme, 8, 16), None if q.zeros is None else numerics.expand(q.zeros, scheme, 8, 16), scheme)
        for c in range(low, high + 1)
    ])  # fmt: skip
    best = (candidates.double() - exact).abs().nan_to_num(nan=float("inf")).amin(0)
    # Three fp32 roundings may favour the wrong one of two neighbours: the quotient's (|w| 2^-24, felt at both distances) and one product's of each neighbour (|w| 2^-24).
    assert (got <= best + exact.abs() * 2.0**-22 + 1e-30).all()


@pytest.mark.parametrize("text", RTN_SCHEMES)
def test_an_all_zero_weight_stays_zero(text: str) -> None:
    scheme = parse(text)
    q, _ = _rtn().quantize(torch.zeros(8, 16), scheme, None, Options())
    assert torch.equal(numerics.dequantize(q), torch.zeros(8, 16))


@given(st.lists(st.floats(1e-12, 60000), min_size=1, max_size=20))
def test_default_scales_are_exact_in_fp16_and_bf16(values: list[float]) -> None:
    scale = numerics.round_scale(torch.tensor(values), ScaleType.F16BF16)
    assert torch.equal(scale.half().float(), scale)
    assert torch.equal(scale.bfloat16().float(), scale)
    assert (scale > 0).all()


@given(st.sampled_from(list(ScaleType)[:6]), st.lists(st.floats(1e-12, 400), min_size=1, max_size=20))
def test_rounded_scales_are_exact_in_their_type_and_stay(kind: ScaleType, values: list[float]) -> None:
    scale = numerics.round_scale(torch.tensor(values), kind)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu, "f16bf16": torch.float16}[kind]
    assert torch.equal(scale.to(dtype).float(), scale)
    assert torch.equal(numerics.round_scale(scale, kind), scale)
    assert (scale > 0).all()


TWO_LEVELS = ["nf4-g4@u8/g16:f32", "fp4-e2m1-g8@e4m3/tensor:f32", "int4-g4-sym@u6/g16:f16", "int3-g8-asym@u6/g16:f16"]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(TWO_LEVELS), st.integers(0, 2**31), st.floats(1e-6, 100), st.booleans())
def test_two_level_scales_come_back_from_their_codes(text: str, seed: int, magnitude: float, holes: bool) -> None:
    scheme = parse(text)
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 32, generator=g) * magnitude * 10 ** torch.randn(12, 1, generator=g)
    if holes:
        weight[3], weight[:, 8:16] = 0, 0
    q, _ = _rtn().quantize(weight, scheme, None, Options())
    assert q.super_scales is not None
    codes = numerics.scale_codes(q.scales, q.super_scales, scheme)
    assert torch.equal(numerics.scales_from_codes(codes, q.super_scales, scheme), q.scales)
    assert torch.isfinite(q.scales).all()
    assert (q.scales > 0).all()
    if holes:
        assert not numerics.dequantize(q)[3].any()


def test_the_dynamic_code_holds_256_values_in_seven_decades() -> None:
    code = numerics.dynamic_code().double()
    assert len(code.unique()) == 256
    assert torch.equal(code, code.sort().values)
    assert (code[code > 0].min(), code.min(), code.max()) == (pytest.approx(5.5e-7), pytest.approx(-0.9929688), 1.0)
    assert [int(((code > 10.0 ** (d - 7)) & (code < 10.0 ** (d - 6))).sum()) for d in range(7)] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("text", RTN_SCHEMES)
@pytest.mark.parametrize("magnitude", [1e-30, 3e38])
def test_extreme_weights_end_in_finite_values_or_in_a_refusal(text: str, magnitude: float) -> None:
    weight = torch.linspace(-1, 1, 128).view(8, 16) * magnitude
    try:
        q, _ = _rtn().quantize(weight, parse(text), None, Options())
    except NumericalError:
        q = None
    assert magnitude > 1 or q is not None
    assert q is None or torch.isfinite(numerics.dequantize(q)).all()


def test_weights_that_are_no_numbers_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NumericalError, match="1 of 128"):
            _rtn().quantize(torch.zeros(128).index_fill(0, torch.tensor([5]), bad).view(8, 16), parse("fp8-dynamic"), None, Options())


UNDEFINED = ["int4-g32-sym@u8/tensor:f32", "int4-g32-sym@u6", "nf4-channel@u8/g256:f32", "int4-g32-sym@u6/g48:f16", "int4-g32-sym@u6/g256:f32",
             "nf4-g64@u8/g256:f16", "int4-g32-asym@u8/g256:f32", "int8-channel-sym+int8-tensor", "int8-channel-sym+int8-token-static",
             "int4-g32-sym+nf4-token", "int8-channel-sym+int4-token"]  # fmt: skip


@pytest.mark.parametrize("method", ["rtn", "gptq", "fp8", "nf4"])
def test_methods_take_what_has_an_arithmetic_and_name_what_has_none(method: str) -> None:
    quantizer = find(method)
    assert quantizer is not None
    assert all(quantizer.supports(parse(text)) is None for text in (*RTN_SCHEMES, *PRESETS))
    assert all(quantizer.supports(parse(text)) for text in UNDEFINED)


@pytest.mark.parametrize("text", ["int8-channel-sym+int8-tensor-static", "fp8-e4m3-tensor+fp8-e4m3-tensor-static"])
def test_a_static_scale_does_not_hide_an_overflow(text: str) -> None:
    x = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf"), 2.0, 1e6]])
    rounded = numerics.quantize_activations(x, parse(text), torch.tensor(0.02))
    assert rounded.isnan().tolist() == [[False, True, True, True, False, False]]
