"""Law 3: unpack(pack(q)) == q bit for bit, for every layout and every scheme that it supports; law 8: `supports` tells the truth both ways."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qforge import numerics
from qforge.layouts.ascend import Ascend
from qforge.layouts.autoawq import AutoAwq
from qforge.layouts.autogptq import AutoGptq
from qforge.layouts.base import Layout
from qforge.layouts.bits import pack_words, unpack_words, words_for
from qforge.layouts.bitsandbytes import BitsAndBytes
from qforge.layouts.compressed_tensors import CompressedTensors
from qforge.layouts.gguf_blocks import GgufBlocks
from qforge.layouts.gguf_q4_k import GgufQ4K
from qforge.layouts.mlx import Mlx
from qforge.layouts.onnx_blocks import MatMulNBits, OnnxDequantize
from qforge.layouts.openvino_weights import OpenvinoWeights
from qforge.layouts.trtllm import TrtLlm
from qforge.qlinear import QuantizedLinear, code_dtype
from qforge.scheme import Number, Scheme, parse

NUMBERS = ["int2", "int3", "int4", "int5", "int6", "int8"]
LAYOUTS: list[Layout] = [
    CompressedTensors(),
    CompressedTensors(padded_zeros=True),
    CompressedTensors(torch.bfloat16),
    AutoGptq(1),
    AutoGptq(2),
    AutoAwq(),
    BitsAndBytes(),
    BitsAndBytes(torch.bfloat16),
    *map(GgufBlocks, ("Q4_0", "Q5_0", "Q8_0")),
    GgufQ4K(),
    MatMulNBits(),
    OnnxDequantize(),
    OpenvinoWeights(),
    Mlx(),
    Ascend(),
    TrtLlm(),
    TrtLlm(torch.bfloat16),
]
INTEGERS = [
    parse(f"{number}-{granularity}-{symmetry}{activations}")
    for number in NUMBERS
    for granularity in ("tensor", "channel", "g32", "g48", "g64", "g256", "block32")
    for symmetry in ("sym", "asym", "offset")
    for activations in ("", "+int8-token")
]
OTHERS = ["fp8-e4m3-channel", "fp8-e4m3-tensor", "fp8-e4m3-block32+fp8-e4m3-g32", "fp8-e4m3-g32", "fp8-e5m2-channel", "fp8-e4m3-tensor+fp8-e4m3-tensor-static", "nf4-g64",
          "fp8-e4m3-block128+fp8-e4m3-g128", "fp8-e4m3-channel+fp8-e4m3-token", "int4-g128-sym",
          "nf4-g64@f32", "nf4-g32@u8/g256:f32", "nf4", "nf4-g48@f32", "mxfp4", "nvfp4", "fp4-e2m1-g16@e4m3", "fp4-e2m1-g64@e8m0", "fp4-e2m1-g32@e8m0+fp8-e4m3-token"]  # fmt: skip
SCHEMES = [*INTEGERS, *map(parse, OTHERS)]
SIZES = st.tuples(st.sampled_from([1, 3, 8, 16, 40]), st.integers(1, 3), st.integers(0, 2**32))  # outputs, groups along the inputs, seed


def linear(scheme: Scheme, out_features: int, groups: int, seed: int) -> QuantizedLinear:
    """Random codes, zero points and scales over their whole range: no quantizer would make these, a layout must hold them all the same."""
    g = torch.Generator().manual_seed(seed)
    in_features = groups * (scheme.granularity.columns or 32)
    rows, columns = scheme.scale_shape(out_features, in_features)
    low, high = scheme.code_range
    if scheme.number is Number.FP8_E4M3:
        codes = torch.randn(out_features, in_features, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(low, high + 1, (out_features, in_features), generator=g).to(code_dtype(scheme))
    weight = torch.rand(out_features, in_features, generator=g) * 10 ** torch.randn(out_features, 1, generator=g)
    upper = numerics.super_scales(weight, scheme)
    scales = numerics.round_scale(torch.rand(rows, columns, generator=g) * 0.1 + 1e-6, scheme.scale.type) if upper is None else numerics.minmax_parameters(weight, scheme)[0]
    zeros = torch.randint(1, high + 1, (rows, columns), generator=g).to(torch.uint8) if not scheme.symmetric else None
    input_scale = torch.rand((), generator=g) if scheme.activations is not None and scheme.activations.static else None
    return QuantizedLinear(scheme, codes, scales, zeros, super_scales=upper, input_scale=input_scale)


def refused(layout: Layout, q: QuantizedLinear) -> bool:
    """Whether the layout holds the scheme, but not in this shape."""
    scheme, out_features, in_features = q.scheme, q.out_features, q.in_features
    match layout:
        case AutoGptq():
            return layout.problem_with(out_features, in_features, scheme.bits) is not None
        case MatMulNBits() | Mlx() | GgufQ4K():
            return layout.problem_with(out_features, in_features) is not None
        case AutoAwq():
            return layout.problem_with(out_features) is not None
        case Ascend():
            return layout.problem_with(scheme, out_features, in_features) is not None
        case TrtLlm():
            return layout.problem_with(scheme, out_features) is not None
    return False


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_unpack_inverts_pack(layout: Layout) -> None:
    """Every scheme that a layout supports, each in several shapes; none may be left out because no drawn shape suits it."""
    supported = [s for s in SCHEMES if layout.supports(s) is None]
    held: set[Scheme] = set()

    @given(SIZES)
    @example((32, 8, 0))
    @settings(max_examples=8, deadline=None)
    def inverted(sizes: tuple[int, int, int]) -> None:
        for scheme in supported:
            q = linear(scheme, *sizes)
            if not refused(layout, q):
                returns(layout, q)
                held.add(scheme)

    inverted()
    assert supported
    assert [str(s) for s in supported if s not in held] == []


@pytest.mark.parametrize("layout", [AutoGptq(1), AutoGptq(2)], ids=repr)
@given(scheme=st.sampled_from([s for s in INTEGERS if AutoGptq(2).supports(s) is None and s.granularity.columns in (32, 64)]), groups=st.integers(2, 3), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_groups_in_activation_order_come_back(layout: Layout, scheme: Scheme, groups: int, seed: int) -> None:
    q = linear(scheme, 32, groups, seed)
    order = torch.randperm(q.in_features, generator=torch.Generator().manual_seed(seed))
    returns(layout, replace(q, group_index=(order // scheme.granularity.columns).int()))


def returns(layout: Layout, q: QuantizedLinear) -> None:
    """Pack, look at shapes, unpack: what went in."""
    scheme = q.scheme
    packed = layout.pack(q)
    if isinstance(layout, MatMulNBits | OnnxDequantize | Mlx | Ascend | TrtLlm):
        assert {name: (tuple(t.shape), t.dtype) for name, t in packed.items()} == layout.shapes(scheme, q.out_features, q.in_features)
    if isinstance(layout, CompressedTensors | BitsAndBytes):
        assert {name: (tuple(t.shape), t.dtype) for name, t in packed.items()} == layout.infos(scheme, q.out_features, q.in_features)
    assert layout.unpack(packed, scheme).equals(q), str(scheme)
    if isinstance(layout, GgufBlocks) and not scheme.symmetric:  # what other programs have left: codes minus zero points
        assert torch.equal(numerics.dequantize(layout.unpack({"weight": packed["weight"]}, scheme)), numerics.dequantize(q))


@given(st.integers(1, 8), st.integers(1, 100), st.integers(1, 3), st.sampled_from([0, 1]), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_words_round_trip_and_hold_bits_in_order(bits, count, rows, dim, seed):
    values = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    values = values.T.contiguous() if dim == 0 else values
    words = pack_words(values, bits, dim)
    assert words.shape[dim] == words_for(count, bits)
    assert torch.equal(unpack_words(words, bits, count, dim), values)
    row = (values if dim == 1 else values.T)[0].tolist()
    whole = sum(v << (i * bits) for i, v in enumerate(row))  # one big integer, the definition
    first = (words if dim == 1 else words.T)[0].tolist()
    assert whole == sum((w & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(first))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
@given(SIZES)
@settings(max_examples=8, deadline=None)
def test_gguf_blocks_dequantize_to_the_same_bits_in_the_gguf_package(kind: str, sizes: tuple[int, int, int]) -> None:
    layout = GgufBlocks(kind)
    supported = [s for s in SCHEMES if layout.supports(s) is None]
    assert len(supported) > 10
    for q in (linear(scheme, *sizes) for scheme in supported):
        theirs = gguf.quants.dequantize(layout.pack(q)["weight"].numpy(), gguf.GGMLQuantizationType[kind])
        assert torch.equal(torch.from_numpy(theirs).reshape(q.codes.shape), numerics.dequantize(q)), str(q.scheme)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.name}-{getattr(x, 'version', '')}")
def test_supports_names_a_reason(layout):
    for text in ("nf4-g48", "int4-g32-offset", "fp8-e5m2-channel", "int4-g32-sym@u6/g256:f16"):
        if text.startswith("fp8") and isinstance(layout, OnnxDequantize):
            continue
        assert layout.supports(parse(text)), text
