"""Every GPU kernel over odd shapes against fp64, case by case, for gpu_check."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton_cases import attention_case, compiled_case, few_case, linear_case, many_case, norm_case, not_finite_case, rope_case, rounding_case, sampling_case, silu_case

from qforge.ops.cuda import w4
from qforge.ops.triton.present import capability

DEVICE = "cuda"
H, B, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn


def cases() -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Every kernel over odd shapes: name, case."""
    float8 = capability(torch.device(DEVICE)) >= 89
    for text in ("int4-g128-sym", "int4-g32-asym", "int4-channel-asym", "int4-g64-asym@f32"):
        for rows, shape in ((1, (1000, 1152)), (1, (77, 128)), (2, (333, 640)), (17, (4100, 1024)), (33, (130, 2048)), (65, (257, 384)), (129, (1000, 1152)), (300, (515, 256))):
            for dtype in (H, B):
                yield f"{text}, {rows} x {shape}, {dtype}", lambda t=text, r=rows, s=shape, d=dtype: linear_case(t, r, s, d, DEVICE, bias=True)
    for rows in (3, 40, 200):
        yield f"int4-g16-asym, {rows} rows", lambda r=rows: linear_case("int4-g16-asym", r, (260, 1040), B, DEVICE, bias=True)
    yield "shuffled groups", lambda: linear_case("int4-g128-asym", 5, (500, 1024), H, DEVICE, shuffled=True)
    for text in ("int8-channel-sym+int8-token", "fp8-e4m3-channel+fp8-e4m3-token", "fp8-e4m3-block128+fp8-e4m3-g128"):
        if text.startswith("int8") or float8:
            for rows, shape in ((1, (1000, 1152)), (3, (333, 640)), (7, (130, 4096)), (65, (257, 384)), (300, (515, 1280))):
                yield f"{text}, {rows} x {shape}", lambda t=text, r=rows, s=shape: linear_case(t, r, s, B, DEVICE, bias=True)
            yield f"rounding, {text}", lambda t=text: rounding_case(t, 9, 1280, DEVICE)
    for stored in (None, INT8, FP8) if float8 else (None, INT8):
        for parts in (1, 4):
            many = {"contexts": (1, 700, 513, 1300), "heads": 8, "cache_heads": 2, "size": 128, "parts": parts, "stored": stored}
            yield f"decode, {stored}, {parts} parts", lambda m=many: attention_case(B, DEVICE, queries=(1, 1, 1, 1), **m)
            yield f"prompts, {stored}, {parts} parts", lambda m=many: attention_case(H, DEVICE, queries=(1, 300, 1, 37), window=200, **m)
        for norms in (False, True):
            yield f"rope{' after norms' if norms else ''}, {stored}", lambda s=stored, n=norms: rope_case(B, DEVICE, s, size=128, norms=n)
        if stored is FP8:
            yield "rope, calibrated fp8", lambda: rope_case(B, DEVICE, FP8, size=128, calibrated=(0.02, 0.01))
    yield "attention, three heads share", lambda: attention_case(H, DEVICE, heads=9, cache_heads=3, size=80, queries=(1, 30, 50))
    for rounded in (None, INT8, FP8) if float8 else (None, INT8):
        yield f"norm, {rounded}", lambda r=rounded: norm_case(B, DEVICE, True, r, columns=4100)
    yield "silu", lambda: silu_case(B, DEVICE, columns=11008)
    for vocabulary in (2, 2048, 32000, 151936):
        yield f"sampling, {vocabulary}", lambda v=vocabulary: sampling_case(v, DEVICE, seed=v, draws=8)
    yield "sampling, not finite", lambda: not_finite_case(50257, DEVICE)
    yield "sampling, equal logits", lambda: sampling_case(50257, DEVICE, ties=True)
    yield from in_cuda()
    yield from ((f"compiled, {text}", lambda t=text: compiled_case(t, DEVICE)) for text in ("int4-g128-asym", "int8-channel-sym+int8-token"))


def in_cuda() -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Every shape of the kernels in CUDA C++, by themselves: `w4_linear` would put another in the place of one that is wrong."""
    if reason := w4.missing(torch.device(DEVICE)):
        print(f"no kernels in CUDA C++: {reason}", flush=True)
        return
    schemes = (
        ("int4-g128-sym", B), ("int4-g128-asym", H), ("int4-g64-asym", B), ("int4-channel-sym", H), ("int4-g32-asym", B), ("int4-g256-asym@bf16", B), ("int4-g96-asym", H),
    )  # fmt: skip
    for text, dtype in schemes:
        short = text in ("int4-g32-asym", "int4-g96-asym")
        for few in w4.FEW_OF_SHORT_GROUPS if short else w4.FEW:
            for rows, shape in ((1, (4096, 4608)), (3, (1032, 768)), (2, (33000, 768)), (4, (136, 768))):  # more tiles than blocks, too
                yield f"cuda {few}, {text}, {rows} x {shape}", lambda t=text, d=dtype, f=few, r=rows, s=shape: few_case(t, r, s, d, DEVICE, f)
        for many in w4.MANY_OF_SHORT_GROUPS if short else w4.MANY:
            for parts, rows, shape in ((1, many.rows - 3, (1032, 1536)), (3, 2 * many.rows + 1, (520, 4608)), (2, many.rows, (4096, 1536)), (1, 7, (40, 768))):
                plan = w4.Plan(many, parts)
                yield f"cuda {plan}, {text}, {rows} x {shape}", lambda t=text, d=dtype, p=plan, r=rows, s=shape: many_case(t, r, s, d, DEVICE, p)


def check(wanted: str) -> dict[str, Any]:
    """A case's error, and whether it is within its tolerance."""
    try:
        error, tolerance = dict(cases())[wanted]()
        row: dict[str, Any] = {"case": wanted, "error": error, "tolerance": tolerance, "right": error <= tolerance}
    except Exception as e:
        row = {"case": wanted, "error": f"{type(e).__name__}: {e}"[:500], "right": False, "trace": traceback.format_exc()[-3000:]}
    print(f"{'right' if row['right'] else 'WRONG'}  {wanted}: {row['error']}", flush=True)
    return row
