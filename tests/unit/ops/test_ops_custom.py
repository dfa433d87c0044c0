"""Kernels as operations of torch: registered as torch.library wants them, traced by torch.compile, and right on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qforge.ops.native import NativeBf16, NativeDense, NativeInt8, NativeKernel, NativeRounded
from qforge.ops.native_module import missing
from qforge.ops.triton import custom_ops
from qforge.ops.triton.cache import empty_cache
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.ops.triton.present import interpreted

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from triton_cases import EPS, error, product64, quantized

OPS = torch.ops.qforge
W4_TEXTS = ("int4-g32-sym", "int4-channel-asym")
W8_TEXTS = ("int8-channel-sym+int8-token", "fp8-e4m3-block128+fp8-e4m3-g128")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()  # tests that share a line of code share its cache of eight graphs


def _w4(text: str, rows: int = 3, bias: bool = True, shuffled: bool = False) -> tuple[Any, ...]:
    w = TritonW4().prepack(quantized(text, (24, 96), bias=bias, shuffled=shuffled))
    return torch.randn(rows, 96).half(), w.words, w.scales, w.zeros, w.order, w.bias, w.in_features, w.group, w.turns, w.either


def _w8(text: str) -> tuple[Any, ...]:
    w = TritonW8().prepack(quantized(text, (130, 256), bias=True))
    return torch.randn(2, 256).half(), w.codes, w.scales, w.bias, w.group, w.input_group, w.limit, w.turns


def _rope(stored: torch.dtype, norms: bool) -> tuple[Any, ...]:
    c, angles = empty_cache(3, 4, 2, 16, stored, "cpu"), torch.rand(8, 8)
    weights = (torch.rand(16), torch.rand(16)) if norms else (None, None)
    positions, slots = torch.tensor([3, 0, 7], dtype=torch.int32), torch.tensor([9, -1, 4])
    return torch.randn(3, 8 * 16).half(), angles.cos(), angles.sin(), positions, slots, 4, c.keys, c.values, c.key_scales, c.value_scales, *weights, 1e-5


def _attention(stored: torch.dtype, window: int) -> tuple[Any, ...]:
    c = empty_cache(6, 4, 2, 16, stored, "cpu")
    if stored == torch.float16:
        c.keys.normal_()
        c.values.normal_()
    tables, starts, lengths = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([9, 11], dtype=torch.int32)
    return torch.randn(4, 4, 16).half(), c.keys, c.values, c.key_scales, c.value_scales, tables, starts, lengths, 3, 11, 0.25, window


CALLS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[Any, ...]]]] = {
    **{f"w4 {t}": (OPS.w4_linear.default, lambda t=t: _w4(t)) for t in W4_TEXTS},
    "w4 one row": (OPS.w4_linear.default, lambda: _w4("int4-g32-asym", 1, bias=False)),
    "w4 shuffled": (OPS.w4_linear.default, lambda: _w4("int4-g32-asym", shuffled=True)),
    **{f"w8 {t}": (OPS.w8_linear.default, lambda t=t: _w8(t)) for t in W8_TEXTS},
    "norm": (OPS.rms_norm.default, lambda: (torch.randn(3, 40).half(), torch.rand(40).half(), 1e-5)),
    "add and norm": (OPS.add_rms_norm.default, lambda: (torch.randn(3, 40).half(), torch.randn(3, 40).half(), torch.rand(40).half(), 1e-5)),
    "silu": (OPS.silu_mul.default, lambda: (torch.randn(3, 80).half(),)),
    "rope": (OPS.rotate_and_store.default, lambda: _rope(torch.float16, False)),
    "rope after norms, int8 cache": (OPS.rotate_and_store.default, lambda: _rope(torch.int8, True)),
    "attention": (OPS.paged_attention.default, lambda: _attention(torch.float16, 0)),
    "attention, int8 cache, window": (OPS.paged_attention.default, lambda: _attention(torch.int8, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_accepts_the_operation(name: str) -> None:
    operation, arguments = CALLS[name]
    given = arguments()
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    float8 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in given)  # torch 2.13 has no comparison of these, which test_schema needs
    found = torch.library.opcheck(operation, given, test_utils=every[float8:])
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.skipif(interpreted(), reason="the interpreter's own tests compare kernels")
@pytest.mark.parametrize("text", [*W4_TEXTS, *W8_TEXTS])
def test_a_compiled_linear_is_one_graph_and_right(text: str) -> None:
    """fullgraph=True fails where anything cannot be traced."""
    q = quantized(text, (130, 256), bias=True)
    kernel = TritonW4() if q.scheme.activations is None else TritonW8()
    packed = kernel.prepack(q)
    nodes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nodes.extend(n.target for n in graph.graph.nodes if "qforge" in str(n.target))
        return graph.forward

    product = torch.compile(lambda x: torch.nn.functional.silu(kernel.run(x, packed)), fullgraph=True, dynamic=True, backend=backend)
    ahead = torch.compile(lambda x: torch.nn.functional.silu(kernel.run(x, packed)), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 2, 9):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).half()
        want = torch.nn.functional.silu(product64(x, q))
        assert error(product(x), want) <= 3 * EPS[torch.float16]
        assert error(ahead(x), want) <= 3 * EPS[torch.float16]
    assert any(("w4_linear" if isinstance(kernel, TritonW4) else "w8_linear") in str(n) for n in nodes)


@pytest.mark.skipif(missing() is not None, reason="no native module")
@pytest.mark.parametrize(
    ("kernel", "text", "shuffled"),
    [
        (NativeKernel(1), "int4-g32-asym", False), (NativeKernel(1), "int4-g32-asym", True), (NativeKernel(1), "nf4-g32", False),
        (NativeKernel(1), "int8-channel-sym+int8-g32", False), (NativeInt8(1), "int8-channel-sym+int8-token", False),
        (NativeRounded(8, 1), "int4-g32-sym", False), (NativeRounded(8, 1), "int4-g64-sym", False), (NativeRounded(16, 1), "int4-g32-sym", True),
        (NativeBf16(1, "portable"), "int4-g32-asym", True), (NativeBf16(1, "portable"), "nf4-g32", False),
    ],
)  # fmt: skip
def test_a_compiled_native_product_has_the_same_bits(kernel: NativeKernel | NativeInt8 | NativeRounded | NativeBf16, text: str, shuffled: bool) -> None:
    q = quantized(text, (37, 192), bias=True, shuffled=shuffled)
    assert kernel.supports(q.scheme, (37, 192), "cpu") is None
    packed = kernel.prepack(q)
    compiled = torch.compile(lambda x: kernel.run(x, packed) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 5):
        x = torch.randn(rows, 192)
        assert torch.equal(compiled(x), kernel.run(x, packed) * 2)


@pytest.mark.skipif(missing() is not None, reason="no native module")
def test_a_compiled_dense_product_has_the_same_bits() -> None:
    kernel, x = NativeDense(1), torch.randn(3, 100)
    packed = kernel.prepack(torch.randn(37, 100).half(), torch.randn(37))
    assert torch.equal(torch.compile(lambda x: kernel.run(x, packed), fullgraph=True, backend="aot_eager")(x), kernel.run(x, packed))


@pytest.mark.skipif(missing() is not None, reason="no native module")
@pytest.mark.parametrize(
    ("kernel", "text", "scale"),
    [
        (NativeKernel(1), "int4-g32-asym", None),
        (NativeInt8(1), "int8-channel-sym+int8-token", 0.0),
        (NativeRounded(8, 1), "int4-g32-sym", None),
        (NativeRounded(8, 1), "int4-g64-sym", None),
    ],
)
def test_torch_accepts_the_native_operation(kernel: NativeKernel | NativeInt8 | NativeRounded, text: str, scale: float | None) -> None:
    packed = kernel.prepack(quantized(text, (37, 192), bias=True))
    t = packed.tiles
    assert t.scales is not None
    assert ((t.code_sums is not None), (t.scales.dtype == torch.float16)) == (isinstance(kernel, NativeRounded),) * 2
    assert (t.pair_sums is not None) == (kernel.code == "avx512-vnni-pairs" and text == "int4-g64-sym")
    sizes = (t.format, t.out_features, t.in_features, t.blocks, t.block_k, t.run, packed.weight.activations)
    given = (torch.randn(3, 192), t.codes, t.scales, t.zeros, t.book, t.code_sums, t.pair_sums, packed.bias, *sizes, scale, 1, None)
    assert set(torch.library.opcheck(OPS.native_linear.default, given).values()) == {"SUCCESS"}


def test_a_compiled_layer_is_one_graph() -> None:
    """Norm, product, rotation into the cache, attention, gate: what lies in a decoder's layer, with its cache written in place."""
    q = quantized("int4-g32-sym", (8 * 16, 64))
    w = TritonW4().prepack(q)
    weight = torch.rand(64).half()

    def layer(x: torch.Tensor, residual: torch.Tensor, place: tuple[Any, ...], step: tuple[Any, ...]) -> torch.Tensor:
        qkv = custom_ops.w4_linear(OPS.add_rms_norm(x, residual, weight, 1e-5), w)
        rotated = OPS.rotate_and_store(qkv, *place)
        return OPS.silu_mul(OPS.paged_attention(rotated, *step).flatten(1))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outcomes = []
    for run in (layer, compiled):
        torch.manual_seed(0)
        x, residual, place = torch.randn(3, 64).half(), torch.randn(3, 64).half(), _rope(torch.float16, False)[1:]
        step = (
            place[5],
            place[6],
            None,
            None,
            torch.tensor([[2, 1]], dtype=torch.int32),
            torch.tensor([0, 3], dtype=torch.int32),
            torch.tensor([5], dtype=torch.int32),
            3,
            5,
            0.25,
            0,
        )
        outcomes.append((run(x, residual, place, step), residual, place[5], place[6]))
    for eager, traced in zip(*outcomes, strict=True):
        assert torch.equal(eager, traced)
    assert outcomes[0][2].any()
