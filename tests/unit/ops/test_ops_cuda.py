"""Products in CUDA C++ without a GPU: their results on this processor, what NVRTC makes of them, and which of them is chosen."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from pathlib import Path

import cuda_emulated
import pytest
import torch

from qforge.errors import QforgeError
from qforge.ops.cuda import compiler, w4
from qforge.ops.cuda.source import Source
from qforge.ops.triton.w4_pack import W4, pack_w4

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))
from triton_cases import EPS, error, product64, quantized

B, H = torch.bfloat16, torch.float16
needs_compiler = pytest.mark.skipif(cuda_emulated.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def _x(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.1).to(dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("text", "shape", "rows", "dtype", "block", "grid"),
    [
        ("int4-channel-sym", (136, 1160), 3, B, w4.FEW[1], 3),  # the last tile begins earlier, the last step is not full
        ("int4-g32-asym", (128, 544), 4, H, w4.FEW_OF_SHORT_GROUPS[0], 1),
        ("int4-g64-asym@f32", (296, 640), 1, B, w4.FEW[0], 2),
        ("int4-channel-asym", (72, 256), 2, H, w4.FEW[1], 2),  # fewer steps than warps
        ("int4-g96-sym", (40, 384), 1, H, w4.FEW_OF_SHORT_GROUPS[1], 1),
        ("int3-tensor-sym@bf16", (64, 128), 4, B, w4.FEW[2], 1),
        ("int4-g256-sym", (96, 2304), 2, B, w4.FEW[2], 2),
    ],
)
def test_few_rows_agree_with_fp64(text: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, block: w4.Few, grid: int, folder: Path) -> None:
    q, x = quantized(text, shape, bias=True), _x(rows, shape[1], dtype)
    y = cuda_emulated.few(x, pack_w4(q), block, folder, grid)
    assert error(y, product64(x, q)) < 2 * EPS[dtype]


@needs_compiler
@pytest.mark.parametrize(
    ("text", "shape", "rows", "dtype", "tile", "parts"),
    [
        ("int4-channel-sym", (136, 1160), 49, B, 0, 1),  # two tiles of rows, the second of one row; outputs and inputs that do not fill theirs
        ("int4-g128-sym", (128, 1536), 40, B, 0, 3),
        ("int4-g32-asym", (264, 640), 64, H, 1, 2),
        ("int4-channel-asym", (128, 2176), 100, B, 2, 1),  # every stage is used again
        ("int4-g32-asym", (40, 512), 130, H, 2, 2),
        ("int4-channel-sym", (128, 1288), 192, B, 3, 1),
        ("int4-g256-asym", (136, 768), 200, H, 4, 2),
    ],
)
def test_many_rows_agree_with_fp64(text: str, shape: tuple[int, int], rows: int, dtype: torch.dtype, tile: int, parts: int, folder: Path) -> None:
    q, x = quantized(text, shape, bias=True), _x(rows, shape[1], dtype)
    y = cuda_emulated.many(x, pack_w4(q), w4.Plan(w4.MANY[tile], parts), folder)
    assert error(y, product64(x, q)) < 2 * EPS[dtype]


FAULTS = {  # in a source: what stands there, what is wrong instead, and the tile, the parts and the inputs with which it shows
    "a stage is given back before it is multiplied": ("w4_many.cu", "products_are_done<1>();\n      if (s > 0", "if (s > 0", 3, 1, 5120),
    "x is read before it is there": ("w4_many.cu", "wait_for(full + 8 * stage, phase);", "", 0, 1, 1920),
    "a stage is filled before it is free": ("w4_many.cu", "if (s >= 2) wait_for(empty + 8 * there, stage < 2 ? phase ^ 1 : phase);", "", 0, 1, 1920),
    "sums of other blocks are read too early": ("w4_many.cu", "if (parts > 1) cluster_meets();\n  const int rows", "const int rows", 0, 2, 1920),
    "sums of other warps are read too early": ("w4_few.cu", "    threads_meet(0, THREADS);\n    const int at_once", "    const int at_once", 1, 1, 1920),
    "sums are written where others still multiply": ("w4_many.cu", "  threads_meet(1, WORKERS);\n  float* sums", "  float* sums", 0, 1, 1920),
    "sums are written where others still add": ("w4_few.cu", "    threads_meet(0, THREADS);\n  };", "  };", 1, 1, 1920),
    "lanes read what others have not brought": ("w4_few.cu", "  warp_meets();\n  int tile", "  int tile", 1, 1, 1920),
    "copies are not waited for": ("w4_few.cu", "  copies_are_there();\n", "", 1, 1, 1920),
}


@needs_compiler
@pytest.mark.parametrize(("file", "right", "wrong", "tile", "parts", "inputs"), FAULTS.values(), ids=FAULTS)
def test_the_emulation_sees_what_would_go_wrong_on_a_gpu(
    file: str, right: str, wrong: str, tile: int, parts: int, inputs: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files = shutil.copytree(ROOT / "qforge/ops/cuda", tmp_path / "cuda")
    text = (files / file).read_text()
    assert text.count(right) == 1
    (files / file).write_text(text.replace(right, wrong))
    q, x = quantized("int4-g128-sym", (136, inputs), bias=True), _x(40 if "many" in file else 3, inputs, B)
    many, ends = "many" in file, "filled before" not in request.node.callspec.id
    with contextlib.nullcontext() if ends else pytest.raises(TimeoutError):  # what the copy engine tells of is no longer what barriers count
        y = cuda_emulated.many(x, pack_w4(q), w4.Plan(w4.MANY[tile], parts), tmp_path, files) if many else cuda_emulated.few(x, pack_w4(q), w4.FEW[tile], tmp_path, 2, files)
        assert not error(y, product64(x, q)) < 2 * EPS[B]


CONSTANTS = {"KIND": 1, "SCALE": 0, "ZEROS": 1, "GROUP": 64, "RUNS": 2}


def test_a_product_is_planned_for_the_processors_there_are() -> None:
    plans = {rows: w4.plan(rows, 4096, 32, 132, 1) for rows in (33, 64, 128, 192, 256, 1000)}
    assert [p.tile.rows for p in plans.values()] == [48, 64, 128, 192, 128, 256]
    assert [w4.plan(rows, 14336, 32, 132, 1).parts for rows in (64, 128, 256)] == [2, 1, 1]
    assert all(p.parts == 1 or 32 // p.parts >= 4 for p in plans.values())
    assert w4.few(1, 4096, 32, 132, 1) == w4.FEW[1]
    assert w4.few(1, 28672, 64, 132, 1) == w4.FEW[2]
    assert w4.few(1, 14336, 32, 132, 1) == w4.FEW[0]
    assert w4.few(4, 8192, 512, 132, 1) is None  # x does not fit into shared memory


def test_a_machine_without_a_gpu_says_why_it_has_no_products_in_cuda() -> None:
    assert w4.missing(torch.device("cpu")) == "they run on NVIDIA GPUs"
    x, w = torch.zeros(1, 128, dtype=B), pack_w4(quantized("int4-g128-sym", (64, 128)))
    assert w4.w4_product(x, w, _never) is None


def _never(x: torch.Tensor, w: W4) -> torch.Tensor:
    raise AssertionError("this product was not to be computed")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of capability 9.0 as far as choosing goes."""
    monkeypatch.setattr(w4, "missing", lambda device: None)
    monkeypatch.setattr(w4, "processors", lambda device: 132)
    monkeypatch.setattr(w4, "_agrees", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def _other(x: torch.Tensor, w: W4) -> torch.Tensor:
    return torch.ones(len(x), w.out_features, dtype=x.dtype) * x[:, :1]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("rows", "kernel"), [(0, None), (1, "multiply_few"), (4, "multiply_few"), (5, None), (32, None), (33, "multiply_many"), (300, "multiply_many"), (1025, None)]
)
def test_a_kernel_is_used_once_it_has_agreed_with_the_other(rows: int, kernel: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("multiply_few", "multiply_many"):
        monkeypatch.setattr(w4, name, lambda x, w, name=name, **how: used.append(name) or _other(x, w) * 1.001)
    x, w = torch.ones(rows, 256, dtype=B), pack_w4(quantized("int4-g128-sym", (64, 256)))
    for _ in range(2):
        y = w4.w4_product(x, w, _other)
        assert (y is None) is (kernel is None)
    assert used == ([kernel] * 4 if kernel else [])


@pytest.mark.usefixtures("card")
def test_a_kernel_that_disagrees_or_fails_is_not_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(x: torch.Tensor, w: W4, **how: object) -> torch.Tensor:
        raise QforgeError("cuLaunchKernelEx fails with CUDA error 1")

    monkeypatch.setattr(w4, "multiply_few", lambda x, w, **how: _other(x, w) * 1.1)
    monkeypatch.setattr(w4, "multiply_many", fails)
    w = pack_w4(quantized("int4-g128-sym", (64, 256)))
    for rows, said in ((1, "off by"), (64, "fails with CUDA error 1")):
        caplog.clear()
        for _ in range(2):
            assert w4.w4_product(torch.ones(rows, 256, dtype=B), w, _other) is None
        (message,) = caplog.messages
        assert said in message


@pytest.mark.usefixtures("card")
def test_a_kernel_is_checked_in_each_number_of_parts_and_with_weights_of_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tried = []
    monkeypatch.setattr(w4, "multiply_many", lambda x, w, p: tried.append(p.parts) or torch.zeros(len(x), w.out_features, dtype=x.dtype))
    for shape in ((64, 4096), (14336, 1024)):
        w = pack_w4(quantized("int4-g128-sym", shape))
        assert w4.w4_product(torch.ones(40, shape[1], dtype=B), w, lambda x, w: torch.zeros(len(x), w.out_features, dtype=x.dtype)) is not None
    assert tried == [4, 4, 4, 1, 1, 1]
    assert caplog.messages == []


@pytest.mark.usefixtures("card")
def test_a_kernel_that_fails_later_or_gives_other_bits_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    w, x, calls = pack_w4(quantized("int4-g128-sym", (64, 256))), torch.ones(1, 256, dtype=B), []

    def fails_the_third_time(x: torch.Tensor, w: W4, **how: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise QforgeError("cuLaunchKernelEx fails with CUDA error 912")
        return _other(x, w)

    monkeypatch.setattr(w4, "multiply_few", fails_the_third_time)
    assert [w4.w4_product(x, w, _other) is None for _ in range(3)] == [False, True, True]
    turns = itertools.cycle((1.0, 1.008))
    monkeypatch.setattr(w4, "multiply_many", lambda x, w, p: _other(x, w) * next(turns))
    assert w4.w4_product(torch.ones(40, 256, dtype=B), w, _other) is None
    assert ["912" in m for m in caplog.messages] == [True, False]
    assert "other bits" in caplog.messages[1]


@pytest.mark.usefixtures("card")
def test_a_card_without_room_for_the_comparison_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(x: torch.Tensor, w: W4) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(w4, "multiply_few", lambda x, w, **how: _other(x, w))
    w, x = pack_w4(quantized("int4-g128-sym", (64, 256))), torch.ones(1, 256, dtype=B)
    assert w4.w4_product(x, w, full) is None
    assert w4.w4_product(x, w, _other) is not None


@pytest.mark.usefixtures("card")
def test_nothing_is_checked_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(w4, "multiply_few", _never)
    assert w4.w4_product(torch.ones(1, 256, dtype=B), pack_w4(quantized("int4-g128-sym", (64, 256))), _never) is None


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("text", "shape", "rows", "dtype"),
    [
        ("int4-g128-sym@f32", (64, 256), 64, B),  # scales that bf16 does not hold
        ("int4-g16-sym", (64, 256), 1, B),
        ("int4-channel-sym", (64, 252), 1, B),
        ("int4-g128-sym", (60, 256), 64, H),
        ("int4-g128-sym", (24, 256), 1, H),
    ],
)
def test_what_the_kernels_are_not_for_is_left_to_others(text: str, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    assert w4.w4_product(torch.ones(rows, shape[1], dtype=dtype), pack_w4(quantized(text, shape)), _never) is None


@pytest.mark.parametrize(("text", "either"), [("int4-g128-sym", True), ("int4-g128-sym@f16", False), ("int4-g32-asym@f32", False), ("int4-g64-sym@bf16", True)])
def test_scales_that_hold_in_both_types_are_known(text: str, either: bool) -> None:
    assert pack_w4(quantized(text, (64, 256))).either is either


@pytest.mark.parametrize("source", [w4.few_source(CONSTANTS, w4.FEW[0]), w4.many_source(CONSTANTS, w4.MANY[4])], ids=["few", "many"])
def test_compiled_code_is_kept_and_compiled_again_when_it_changes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs: benchmarks/cuda_budget.py."""
    if reason := compiler.missing():
        pytest.skip(reason)
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path))
    code = compiler.compiled(source, "sm_90a")
    assert code[:4] == b"\x7fELF"
    (kept,) = (tmp_path / "cuda").iterdir()
    whole = kept.read_bytes()
    monkeypatch.setattr(compiler, "compile_now", lambda *_: (b"compiled again", ""))
    assert compiler.compiled(source, "sm_90a") == code
    kept.write_bytes(whole[:-1])
    assert compiler.compiled(source, "sm_90a") == b"compiled again"
    monkeypatch.undo()
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "other"))
    (tmp_path / "other").write_text("a file where a folder should be")
    assert compiler.compiled(source, "sm_90a") == code
    other = Source(source.kernel, tuple((n, 0 if n == "KIND" else v) for n, v in source.constants))
    assert compiler.compiled(other, "sm_90a")[:4] == b"\x7fELF"


def test_a_machine_without_nvrtc_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(compiler.ctypes, "CDLL", none)
    compiler._library.cache_clear()
    assert "NVRTC is not there" in str(compiler.missing())
    compiler._library.cache_clear()


def test_what_nvrtc_refuses_is_said() -> None:
    if reason := compiler.missing():
        pytest.skip(reason)
    with pytest.raises(QforgeError, match=r"does not compile w4_few\.cu for sm_90a: .*error"):
        compiler.compile_now(Source.of("w4_few", {"KIND": 1}), "sm_90a")
