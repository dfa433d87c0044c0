"""The GPU kernels in Triton's interpreter; run by test_ops_triton.py in a process of its own, because Triton reads the variable when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qforge.ops.triton.tiles import Tile

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import gpu_check
from triton_cases import Case, attention_case, linear_case, norm_case, rope_case, rounding_case, silu_case

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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gpu_check_makes_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the clock and the graphs, with tiny shapes; torch's attention is not run, to be quick."""

    def once(calls: list[gpu_check.Timed], rounds: int = 15) -> float:
        calls[0]()
        return 2.0

    for name, value in (("DEVICE", "cpu"), ("SHAPES", ((32, 128), (16, 128))), ("ROWS", (1, 5)), ("COLD_BYTES", 0), ("microseconds", once), ("CONTEXTS", ((2, 20, 1), (1, 20, 7)))):
        monkeypatch.setattr(gpu_check, name, value)
    most = {"bytes": 1e12, "bfloat16": 1e14}
    products, attention = gpu_check.linears(most, quick=False), gpu_check.attentions()
    assert [(p["outputs"], p["rows"]) for p in products] == [(32, 1), (32, 5), (16, 1), (16, 5)]
    assert products[0]["floor_us"] == pytest.approx((32 * 64 + 32 * 2 + 2 * 160) / 1e6)
    assert {len(p["w4_tiles_us"]) > 3 for p in products} == {True}
    facts = dict.fromkeys(("device", "date", "commit", "driver", "cuda", "torch", "triton"), "some")
    page = gpu_check.markdown({**facts, "cases": [{"case": "one", "right": False}], "ceilings": most, "linears": products, "attention": attention})
    assert "Right: 0 of 1 cases. Wrong: one" in page
    assert len(page.splitlines()) == 10 + 4 + 3 + 2


def test_every_case_of_gpu_check_can_be_made() -> None:
    assert len({name for name, _ in gpu_check.cases()}) == len(list(gpu_check.cases())) > 90
