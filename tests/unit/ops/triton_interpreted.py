"""The GPU kernels in Triton's interpreter; run by test_ops_triton.py in a process of its own, because Triton reads the variable when it is imported."""

from __future__ import annotations

import pytest
import torch
from triton_cases import Case, attention_case, linear_case, norm_case, rope_case, rounding_case, silu_case

from qforge.ops.triton.tiles import Tile

H, B, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
ROWS = Tile(16, 32, 64, 4, 2)
CASES: dict[str, Case] = {
    "one row, groups": lambda: linear_case("int4-g32-sym", 1, (40, 96), H, "cpu"),
    "one row, zeros, bias, bf16": lambda: linear_case("int4-g64-asym", 1, (33, 128), B, "cpu", bias=True),
    "one row, channel, ragged": lambda: linear_case("int4-channel-asym", 1, (20, 72), H, "cpu"),
    "one row on the other kernel": lambda: linear_case("int4-g32-asym", 1, (40, 96), H, "cpu", tile=ROWS),
    "several rows, groups": lambda: linear_case("int4-g32-asym", 3, (40, 96), B, "cpu", bias=True),
    "several rows, groups of 48": lambda: linear_case("int4-g48-sym", 2, (24, 96), H, "cpu"),
    "several rows, channel, ragged": lambda: linear_case("int4-channel-sym", 17, (70, 72), H, "cpu", bias=True),
    "several rows, tensor, 3 bits": lambda: linear_case("int3-tensor-sym", 2, (24, 64), H, "cpu"),
    "several rows, fp32 scales": lambda: linear_case("int4-g32-sym@f32", 5, (24, 64), H, "cpu"),
    "several rows, shuffled groups": lambda: linear_case("int4-g32-asym", 2, (24, 96), H, "cpu", shuffled=True),
    "several rows, K in parts": lambda: linear_case("int4-g32-asym", 2, (40, 512), B, "cpu", bias=True, tile=Tile(16, 32, 32, 4, 2, 4)),
    "fp32 input": lambda: linear_case("int4-g32-sym", 2, (24, 64), torch.float32, "cpu"),
    "int8 rounded within the product": lambda: linear_case("int8-channel-sym+int8-token", 3, (40, 72), H, "cpu", bias=True),
    "int8 rounded before the product": lambda: linear_case("int8-channel-sym+int8-token", 5, (40, 300), B, "cpu", bias=True),
    "int8 in parts": lambda: linear_case("int8-tensor-sym+int8-token", 2, (24, 1024), H, "cpu", bias=True),
    "int8 groups": lambda: linear_case("int8-g64-sym+int8-token", 2, (24, 128), H, "cpu"),
    "int8 groups on both sides": lambda: linear_case("int8-g64-sym+int8-g128", 2, (24, 256), H, "cpu"),
    "fp8 within the product": lambda: linear_case("fp8-e4m3-channel+fp8-e4m3-token", 3, (40, 72), H, "cpu"),
    "fp8 before the product": lambda: linear_case("fp8-e4m3-tensor+fp8-e4m3-token", 7, (40, 72), B, "cpu"),
    "fp8 blocks within": lambda: linear_case("fp8-e4m3-block128+fp8-e4m3-g128", 2, (140, 256), B, "cpu"),
    "fp8 blocks before": lambda: linear_case("fp8-e4m3-block128+fp8-e4m3-g128", 6, (140, 256), H, "cpu"),
    "rounding to int8": lambda: rounding_case("int8-channel-sym+int8-token", 3, 4200, "cpu"),
    "rounding to int8 groups": lambda: rounding_case("int8-channel-sym+int8-g32", 3, 96, "cpu"),
    "rounding to fp8": lambda: rounding_case("fp8-e4m3-channel+fp8-e4m3-token", 3, 72, "cpu"),
    "attention": lambda: attention_case(H, "cpu"),
    "attention, chunks of prompts among decoding, bf16": lambda: attention_case(B, "cpu", queries=(1, 20, 9)),
    "attention, window": lambda: attention_case(H, "cpu", queries=(1, 5, 30), window=16),
    "attention, three heads share, odd head": lambda: attention_case(H, "cpu", heads=6, cache_heads=2, size=24, queries=(1, 7, 2)),
    "attention, in parts": lambda: attention_case(H, "cpu", contexts=(3, 150, 70), parts=4),
    "attention, in parts, window": lambda: attention_case(H, "cpu", contexts=(3, 150, 70), parts=2, window=40),
    "attention, int8 cache": lambda: attention_case(H, "cpu", stored=INT8, queries=(1, 5, 2)),
    "attention, fp8 cache": lambda: attention_case(H, "cpu", stored=FP8, parts=2),
    "rope": lambda: rope_case(H, "cpu"),
    "rope, bf16": lambda: rope_case(B, "cpu", size=32),
    "rope, int8 cache": lambda: rope_case(H, "cpu", INT8),
    "rope, fp8 cache": lambda: rope_case(H, "cpu", FP8),
    "norm": lambda: norm_case(H, "cpu"),
    "norm and addition": lambda: norm_case(B, "cpu", True),
    "norm to int8": lambda: norm_case(H, "cpu", True, INT8),
    "norm to fp8": lambda: norm_case(H, "cpu", False, FP8),
    "silu": lambda: silu_case(H, "cpu"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for the 0 / 0 of rows that are not stored
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_agrees_with_fp64(case: Case) -> None:
    error, tolerance = case()
    assert error <= tolerance
