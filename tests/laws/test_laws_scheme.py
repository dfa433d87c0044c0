"""Law 1: parse(str(scheme)) == scheme. Law 2: every RTN code is the nearest representable one given the final scales, by brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qforge import numerics
from qforge.errors import RecipeError
from qforge.methods import Options, find
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


RTN_SCHEMES = ["int2-g8-sym", "int3-g8-asym", "int4-g8-sym", "int4-g16-asym", "int4-g8-offset", "int4-channel-sym", "int4-tensor-asym", "int8-g16-sym", "int8-channel-asym",
               "int8-channel-sym@f32", "fp8-e4m3-channel", "fp8-e4m3-block8", "fp8-e5m2-tensor", "nf4-g16", "fp4-e2m1-g16@e8m0", "fp4-e2m1-g16@e4m3"]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(RTN_SCHEMES), st.integers(0, 2**31), st.floats(1e-5, 100))
@example("int8-channel-sym@f32", 1, 1.0)  # such a tie
def test_rtn_codes_are_the_nearest(text: str, seed: int, magnitude: float) -> None:
    scheme = parse(text)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * magnitude
    rtn = find("rtn")
    assert rtn is not None
    q, _ = rtn.quantize(weight, scheme, None, Options())
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
    rtn = find("rtn")
    assert rtn is not None
    q, _ = rtn.quantize(torch.zeros(8, 16), scheme, None, Options())
    assert torch.equal(numerics.dequantize(q), torch.zeros(8, 16))


@given(st.lists(st.floats(1e-12, 60000), min_size=1, max_size=20))
def test_default_scales_are_exact_in_fp16_and_bf16(values: list[float]) -> None:
    scale = numerics.round_scale(torch.tensor(values), ScaleType.F16BF16)
    assert torch.equal(scale.half().float(), scale)
    assert torch.equal(scale.bfloat16().float(), scale)
    assert (scale > 0).all()
