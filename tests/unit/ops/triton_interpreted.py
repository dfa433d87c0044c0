"""The GPU kernels in Triton's interpreter; run by test_ops_triton.py in a process of its own, because Triton reads the variable when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qforge.ops.triton.products import DENSE_TILE, w4_multiplied_dense
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.w4_pack import pack_w4

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import gpu_check
import gpu_sanitize
from triton_cases import (
    EPS,
    Case,
    attention_case,
    compiled_case,
    error,
    linear_case,
    norm_case,
    not_finite_case,
    product64,
    quantized,
    rope_case,
    rounding_case,
    sampling_case,
    silu_case,
)

H, B, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
CASES: dict[str, Case] = {
    "one row, groups": lambda: linear_case("int4-g32-sym", 1, (40, 96), H, "cpu"),
    "one row, zeros, bias, bf16": lambda: linear_case("int4-g64-asym", 1, (33, 128), B, "cpu", bias=True),
    "one row, channel, ragged": lambda: linear_case("int4-channel-asym", 1, (20, 72), H, "cpu"),
    "several rows, groups": lambda: linear_case("int4-g32-asym", 3, (40, 96), B, "cpu", bias=True),
    "several rows, groups of 48": lambda: linear_case("int4-g48-sym", 2, (24, 96), H, "cpu"),
    "several rows, channel, ragged": lambda: linear_case("int4-channel-sym", 17, (70, 72), H, "cpu", bias=True),
    "several rows, tensor, 3 bits": lambda: linear_case("int3-tensor-sym", 2, (24, 64), H, "cpu"),
    "several rows, fp32 scales": lambda: linear_case("int4-g32-sym@f32", 5, (24, 64), H, "cpu"),
    "several rows, shuffled groups": lambda: linear_case("int4-g32-asym", 2, (24, 96), H, "cpu", shuffled=True),
    "several rows, K in parts": lambda: linear_case("int4-g32-asym", 2, (40, 512), B, "cpu", bias=True, tile=Tile(16, 32, 128, 4, 2, 2)),
    "several rows, K in uneven parts": lambda: linear_case("int4-g16-asym", 2, (40, 620 - 620 % 16), H, "cpu", bias=True, tile=Tile(16, 32, 128, 4, 2, 2)),
    "many rows": lambda: linear_case("int4-g32-asym", 200, (40, 128), H, "cpu", bias=True),
    "fp32 input": lambda: linear_case("int4-g32-sym", 2, (24, 64), torch.float32, "cpu"),
    "int8, three rows": lambda: linear_case("int8-channel-sym+int8-token", 3, (40, 72), H, "cpu", bias=True),
    "int8, five rows, bf16": lambda: linear_case("int8-channel-sym+int8-token", 5, (40, 300), B, "cpu", bias=True),
    "int8 in parts": lambda: linear_case("int8-tensor-sym+int8-token", 2, (24, 1024), H, "cpu", bias=True),
    "int8 in uneven parts": lambda: linear_case("int8-channel-sym+int8-token", 5, (24, 640), H, "cpu"),
    "int8 groups": lambda: linear_case("int8-g64-sym+int8-token", 2, (24, 128), H, "cpu"),
    "int8 groups on both sides": lambda: linear_case("int8-g64-sym+int8-g128", 2, (24, 256), H, "cpu"),
    "fp8, three rows": lambda: linear_case("fp8-e4m3-channel+fp8-e4m3-token", 3, (40, 72), H, "cpu"),
    "fp8, seven rows, a scale for the tensor": lambda: linear_case("fp8-e4m3-tensor+fp8-e4m3-token", 7, (40, 72), B, "cpu"),
    "fp8 blocks, two rows": lambda: linear_case("fp8-e4m3-block128+fp8-e4m3-g128", 2, (140, 256), B, "cpu"),
    "fp8 blocks, six rows": lambda: linear_case("fp8-e4m3-block128+fp8-e4m3-g128", 6, (140, 256), H, "cpu"),
    "rounding to int8": lambda: rounding_case("int8-channel-sym+int8-token", 3, 4200, "cpu"),
    "rounding to int8 groups": lambda: rounding_case("int8-channel-sym+int8-g32", 3, 96, "cpu"),
    "rounding to fp8": lambda: rounding_case("fp8-e4m3-channel+fp8-e4m3-token", 3, 72, "cpu"),
    "attention": lambda: attention_case(H, "cpu"),
    "attention, chunks of prompts among decoding, bf16": lambda: attention_case(B, "cpu", queries=(1, 20, 9)),
    "attention, window": lambda: attention_case(H, "cpu", queries=(1, 5, 30), window=16),
    "attention, three heads share, odd head": lambda: attention_case(H, "cpu", heads=6, cache_heads=2, size=24, queries=(1, 7, 2)),
    "attention, in parts": lambda: attention_case(H, "cpu", contexts=(3, 150, 70), parts=4),
    "attention, in parts, window": lambda: attention_case(H, "cpu", contexts=(3, 150, 70), parts=2, window=40),
    "attention, in parts, logits of hundreds": lambda: attention_case(H, "cpu", contexts=(3, 150, 70), parts=4, sharp=60),
    "attention, int8 cache": lambda: attention_case(H, "cpu", stored=INT8, queries=(1, 5, 2)),
    "attention, fp8 cache": lambda: attention_case(H, "cpu", stored=FP8, parts=2),
    "rope": lambda: rope_case(H, "cpu"),
    "rope, bf16": lambda: rope_case(B, "cpu", size=32),
    "rope, int8 cache": lambda: rope_case(H, "cpu", INT8),
    "rope after norms": lambda: rope_case(H, "cpu", norms=True),
    "rope after norms, int8 cache": lambda: rope_case(B, "cpu", INT8, size=32, norms=True),
    "rope, fp8 cache": lambda: rope_case(H, "cpu", FP8),
    "rope, calibrated fp8 cache": lambda: rope_case(H, "cpu", FP8, calibrated=(0.02, 0.01)),
    "sampling": lambda: sampling_case(150, "cpu", 32),
    "sampling, equal logits": lambda: sampling_case(150, "cpu", 32, seed=1, ties=True),
    "sampling, not finite": lambda: not_finite_case(150, "cpu", 32),
    "sampling, one chunk": lambda: sampling_case(20, "cpu", 32, seed=2, ties=True),
    "norm": lambda: norm_case(H, "cpu"),
    "norm and addition": lambda: norm_case(B, "cpu", True),
    "norm to int8": lambda: norm_case(H, "cpu", True, INT8),
    "norm to fp8": lambda: norm_case(H, "cpu", False, FP8),
    "silu": lambda: silu_case(H, "cpu"),
    "silu, two tiles": lambda: silu_case(H, "cpu", 1100),
    "compiled": lambda: compiled_case("int4-g32-asym", "cpu"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for the 0 / 0 of rows that are not stored
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_agrees_with_fp64(case: Case) -> None:
    error, tolerance = case()
    assert error <= tolerance


@pytest.mark.parametrize(("text", "shape"), [("int4-g48-asym", (150, 96)), ("int4-g16-sym", (130, 144)), ("int4-channel-asym", (70, 72))])
def test_outputs_are_unpacked_some_after_the_others(text: str, shape: tuple[int, int]) -> None:
    q = quantized(text, shape, bias=True)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(7)).half()
    y = w4_multiplied_dense(x, pack_w4(q), 2 * shape[1] * DENSE_TILE)
    assert error(y, product64(x, q)) < 2 * EPS[H]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gpu_check_makes_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the clock and the graphs, with tiny shapes; torch's attention is not run, to be quick."""

    def once(calls: list[gpu_check.Timed], rounds: int = 15) -> float:
        calls[0]()
        return 2.0

    for name, value in (
        ("DEVICE", "cpu"),
        ("SHAPES", ((32, 128), (16, 128))),
        ("ROWS", (1, 5)),
        ("COLD_BYTES", 0),
        ("microseconds", once),
        ("CONTEXTS", ((2, 20, 1), (1, 20, 7))),
        ("LOGITS", ((2, 50),)),
    ):
        monkeypatch.setattr(gpu_check, name, value)
    most = {"bytes": 1e12, "bfloat16": 1e14}
    monkeypatch.setattr(gpu_check, "_torch_top_p", lambda *how: None)
    found = {"linears": list(gpu_check.linears(most, quick=False)), "tiles": list(gpu_check.swept(quick=False))}
    found |= {"attention": list(gpu_check.attentions()), "sampling": list(gpu_check.samplings())}
    products = found["linears"]
    assert [(p["outputs"], p["rows"]) for p in products] == [(32, 1), (32, 5), (16, 1), (16, 5)]
    assert products[0]["floor_us"] == pytest.approx((32 * 64 + 32 * 2 + 2 * 160) / 1e6)
    assert {len(t["us"]) > 3 for t in found["tiles"]} == {True}
    facts = dict.fromkeys(("device", "date", "commit", "driver", "cuda", "torch", "triton"), "some")
    said = {"sanitizer": [["memcheck", "clean"], ["racecheck", "ERROR"]], "runtime": [], "quantization": [{"what": "rounding", "right": False}], "unfinished": {"runtime": "hung"}}
    page = gpu_check.markdown({**facts, "cases": [{"case": "one", "right": False}], "ceilings": [most]} | found | said)
    for words in ("Right: 0 of 1 cases. Wrong: one", "memcheck clean, racecheck NOT CLEAN", "Not whole: runtime: hung.", "bit for bit | 0 of 1 | NO |", "| not measured |"):
        assert words in page
    assert sum(line.startswith("| ") and "---" not in line for line in page.splitlines()) == (1 + 9) + (1 + 4) + (1 + 2) + (1 + 1)


def result(**changed: Any) -> dict[str, Any]:
    """Of a check that went well."""
    right: dict[str, Any] = {s.name: [] for s in gpu_check.sections(quick=False)} | {"unfinished": {}}
    row = {"rows": 1, "weight_bytes": 4e7, "of_roofline": 0.7, "over_cublas": 3.2}
    right |= {"cases": [{"case": "one", "right": True}], "linears": [row, {**row, "rows": 256, "over_cublas": 0.9}], "attention": [{"of_sdpa_speed": 0.85}]}
    right |= {"quantization": [{"what": "rounding", "right": True}, {"what": "gptq", "right": True}], "sanitizer": [["memcheck", "clean"]]}
    served = {"model": "1B", "engine": "qforge", "scheme": "int4-g128-sym", "what": "decode", "batch": 1}
    rows: list[dict[str, Any]] = [{**served, "recorded": r, "ms": ms} for r, ms in ((True, 2.0), (False, 5.0))]
    rows.append({**served, "what": "throughput", "recorded": True, "tokens_per_second": 900})
    other = {"model": "1B", "engine": "transformers", "scheme": "none", "what": "throughput"}
    rows += [{**other, "how": "one by one", "tokens_per_second": 80}, {**other, "how": "one batch", "tokens_per_second": 250}]
    return right | {"runtime": rows} | changed


def test_gpu_check_says_which_claims_hold() -> None:
    assert [holds for _, _, holds in gpu_check.claims(result())] == [True] * 9
    slow = gpu_check.claims(result(linears=[{"rows": 1, "weight_bytes": 4e7, "of_roofline": 0.5, "over_cublas": 2.9}], runtime=[], attention=[{"of_sdpa_speed": 0.7}]))
    assert [holds for _, _, holds in slow] == [False, False, None, False, None, None, None, True, True]
    assert [said for _, said, _ in slow][:2] == ["0.50", "2.90"]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, 0), ({"unfinished": {"runtime": "late", "tiles": "late"}}, 0), ({"unfinished": {"cases": "late"}}, 1), ({"unfinished": {"sanitizer": "late"}}, 1),
        ({"cases": []}, 1), ({"cases": [{"right": False}]}, 1),
        ({"quantization": [{"what": "gptq", "right": False}]}, 1), ({"sanitizer": [["memcheck", "ERROR"]]}, 1),
    ],
)  # fmt: skip
def test_gpu_check_fails_where_something_is_wrong_and_not_where_time_was_short(changed: dict[str, Any], code: int) -> None:
    assert gpu_check.verdict(result(**changed)) == code


def test_gpu_check_ends_within_ten_minutes() -> None:
    parts = sum(s.seconds for s in gpu_check.sections(quick=False))
    assert parts + 20 <= gpu_check.LIMIT_S <= 585  # 20 s to start, 15 to write


def test_nothing_wrong_is_timed() -> None:
    assert gpu_check.left_out("linears", {"cases": [{"right": False}]}) == "a kernel is wrong"
    assert gpu_check.left_out("linears", {"cases": [{"right": True}]}) is None
    assert gpu_check.left_out("quantization", {"cases": [{"right": False}]}) is None


def test_every_case_of_gpu_check_can_be_made() -> None:
    assert len({name for name, _ in gpu_check.cases()}) == len(list(gpu_check.cases())) > 90


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["w4 parts", "attention, window, parts, int8 cache", "rope", "rounding"])
def test_what_the_sanitizer_watches_is_right(name: str) -> None:
    error, tolerance = gpu_sanitize.small("cpu")[name]()
    assert error <= tolerance
