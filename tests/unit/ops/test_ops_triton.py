"""The GPU kernels as far as they can be proved without a GPU: numbers in Triton's interpreter, packing, the assembly's arithmetic, the choice, and the machine code's cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qforge.ops.select import choose
from qforge.ops.triton import tiles
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.ops.triton.offline import torn_pairs
from qforge.ops.triton.w4_pack import pack_w4, pack_words, unpack_w4, unpack_words
from qforge.ops.triton.w8_pack import pack_w8
from qforge.scheme import Symmetry, parse

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))
from triton_cases import quantized


def test_every_kernel_agrees_with_fp64_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/ops/triton_interpreted.py"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 35


@given(rows=st.integers(1, 5), steps=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_words_round_trip(rows: int, steps: int, seed: int) -> None:
    codes = torch.randint(0, 16, (rows, steps * 128), generator=torch.Generator().manual_seed(seed))
    words = pack_words(codes.int())
    assert words.dtype == torch.int32
    assert words.shape == (steps, rows, 16)
    assert torch.equal(unpack_words(words), codes.byte())


@pytest.mark.parametrize("j", range(8))
@pytest.mark.parametrize("w", [0, 5, 14])
def test_neighbours_lie_in_the_two_halves_of_a_word(j: int, w: int) -> None:
    codes = torch.zeros(3, 256, dtype=torch.int32)
    codes[1, 128 + 16 * j + w] = 15
    words = pack_words(codes)
    assert int(words[1, 1, w // 2 * 2 + j // 4]) & 0xFFFFFFFF == 15 << (4 * (j % 4) + 16 * (w % 2))
    assert int(words.count_nonzero()) == 1


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g64-asym", "int3-channel-asym", "int2-tensor-sym", "int4-channel-sym@f32", "int4-g48-asym@bf16"])
def test_packed_weights_hold_every_bit(text: str) -> None:
    q = quantized(text, (20, 192))
    codes, scales, zeros = unpack_w4(pack_w4(q), q.scheme.symmetry)
    assert torch.equal(codes, q.codes)
    assert torch.equal(scales, q.scales.expand(20, -1))
    assert (zeros is None) == (q.scheme.symmetry is Symmetry.SYM)
    assert zeros is None or q.zeros is None or torch.equal(zeros, q.zeros.expand(20, -1))


def test_packed_8_bit_weights_hold_every_bit() -> None:
    q = quantized("fp8-e4m3-block128+fp8-e4m3-g128", (140, 256))
    w = pack_w8(q)
    assert torch.equal(w.codes.view(torch.uint8), q.codes)
    assert torch.equal(w.scales, torch.cat((q.scales[:1].expand(128, -1), q.scales[1:].expand(12, -1))).T)


def _emulate(assembly: str, pairs: np.ndarray, bias: np.ndarray, add: object) -> np.ndarray:
    """`[n, 8, 2]` 16-bit patterns: what the assembly leaves in $0 .. $7 for pairs of words `[n, 2]`, $8 and $9, and biases $10."""
    registers = {"$8": pairs[:, 0], "$9": pairs[:, 1]}
    for line in re.split(r"[;\n]", assembly.replace("{ .reg", ".reg").rstrip(" }\n")):
        name, _, rest = line.strip().partition(" ")
        places = [p.strip() for p in rest.split(",")]
        if name == "shr.b32":
            registers[places[0]] = registers[places[1]] >> np.uint32(places[2])
        elif name == "lop3.b32":
            assert int(places[4], 16) == (0xF0 & 0xCC) | 0xAA  # the truth table of (a and b) or c
            registers[places[0]] = (registers[places[1]] & np.uint32(int(places[2], 16))) | np.uint32(int(places[3], 16))
        elif name in ("add.rn.f16x2", "fma.rn.bf16x2"):
            assert places[-1] == "$10"
            registers[places[0]] = add(registers[places[1]], bias)  # type: ignore[operator]
    return np.stack([np.ascontiguousarray(registers[f"${j}"]).view(np.uint16).reshape(-1, 2) for j in range(8)], 1)


@pytest.mark.parametrize(("kind", "dtype", "base"), [("_HALF", torch.float16, 0xE400), ("_BF16", torch.bfloat16, 0xC300)])
def test_the_assembly_unpacks_exactly(kind: str, dtype: torch.dtype, base: int) -> None:
    """Every pair of a code and a zero point, at every place of a step."""
    pytest.importorskip("triton")
    from qforge.ops.triton.device import w4

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        halves = [torch.from_numpy(np.ascontiguousarray(v.astype(np.uint32))).view(torch.uint16).view(dtype).double() for v in (a, b)]
        total = halves[0] + halves[1]
        assert torch.equal(total.to(dtype).double(), total)  # the hardware's sum is exact
        return total.to(dtype).view(torch.uint16).numpy().view(np.uint32)

    codes = (torch.arange(128)[None] * 7 + torch.arange(16)[:, None]).int() % 16  # [16, 128]: all codes at all places
    pairs = pack_words(codes)[0].view(128, 2).repeat(16, 1)  # of 16 outputs 8 pairs each
    zeros = torch.arange(16).repeat_interleave(128)
    got = _emulate(getattr(w4, kind), pairs.numpy().view(np.uint32), ((zeros | base) * 0x10001).numpy().astype(np.uint32), add)
    got_codes = torch.from_numpy(got).view(dtype).double().view(16, 16, 8, 8, 2).transpose(2, 3).flatten(2)  # [zero, output, j, pair, neighbour]
    assert torch.equal(got_codes, (codes[None] - torch.arange(16)[:, None, None]).double())


def test_a_gpu_is_asked_for_by_name() -> None:
    choice = choose(parse("int4-g128-asym"), (64, 128), "cuda")
    if not torch.cuda.is_available():
        assert choice.kernel.name == "reference"
        assert "activations are not rounded" in choice.explain() or "neither" in choice.explain()
        assert re.search("triton-w4a16: (torch finds no NVIDIA GPU|the package triton is not installed)", choice.explain())
    assert "triton" not in choose(parse("int4-g128-asym"), (64, 128), "cpu").explain()


def test_without_triton_the_choice_says_so() -> None:
    code = "import sys; sys.modules['triton'] = None; from qforge.ops.select import choose; from qforge.scheme import parse\n"
    code += "print(choose(parse('int4-g128-asym'), (64, 128), 'cuda').explain())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "reference" in done.stdout
    assert "pip install 'qforge[gpu]'" in done.stdout


@pytest.mark.parametrize(
    ("kernel", "text", "reason"),
    [
        (TritonW4(), "int8-channel-sym", "not a 4-bit integer"), (TritonW4(), "int4-g32-offset@u6/g256:f16", "zero point or none"), (TritonW4(), "int4-g8-sym", "multiple of 16"),
        (TritonW4(), "int4-block128-sym", "blocks"), (TritonW4(), "int4-g32-sym+int8-token", "rounded"), (TritonW8(), "int8-channel-asym+int8-token", "neither symmetric"),
        (TritonW8(), "int8-channel-sym+int8-tensor-static", "not rounded"), (TritonW8(), "int8-g16-sym+int8-token", "multiple of 32"),
        (TritonW8(), "int8-channel-sym+int8-g96", "power of two"), (TritonW8(), "int8-channel-sym+fp8-e4m3-token", "not rounded to int8"),
    ],
)  # fmt: skip
def test_what_is_not_run_has_a_reason(kernel: TritonW4 | TritonW8, text: str, reason: str) -> None:
    assert reason in (kernel.supports(parse(text), (64, 768), "cuda") or "")


@given(rows=st.integers(1, 512), outputs=st.integers(1, 30000), steps=st.integers(1, 300), processors=st.integers(1, 200), of=st.sampled_from(tiles.CLASSES))
def test_parts_are_never_shorter_than_two_steps(rows: int, outputs: int, steps: int, processors: int, of: int) -> None:
    tile = tiles.tile_for(tiles.W4_GEMM[of], rows)
    parts = tiles.parts_of(tile, rows, outputs, steps * tile.k, processors)
    assert 1 <= parts <= tile.parts
    assert parts == 1 or steps >= 2 * parts


@pytest.mark.parametrize(("capability", "of"), [(80, 80), (86, 80), (89, 80), (90, 90), (100, 100), (103, 100), (120, 80)])
def test_a_device_runs_tiles_that_fit_its_shared_memory(capability: int, of: int) -> None:
    assert tiles.device_class(capability) == of


def _recorded() -> dict[str, dict[str, dict[str, int]]]:
    return dict(json.loads((ROOT / "benchmarks/results/triton-budget.json").read_text())["costs"])


def test_every_shipped_configuration_is_in_the_budget() -> None:
    pytest.importorskip("triton")
    import triton_budget

    shipped = {(v.name, str(triton_budget.target_of(v, of))) for of in tiles.CLASSES for v in triton_budget.variants(of)}
    assert shipped == {(name, target) for name, row in _recorded().items() for target in row}
    assert triton_budget.gone(_recorded()) == []
    assert triton_budget.gone({**_recorded(), "w4 3 rows": {"90": {}}}) == ["w4 3 rows, sm_90: in the table, and not shipped"]


NAME, PROMPT = "w4 16 rows, fp16 g128 zeros", "attention prompt, bf16, head 128"


@pytest.mark.parametrize(
    ("name", "target", "changed", "says"),
    [
        (NAME, 80, {}, []), (NAME, 90, {"registers": 2, "instructions": 20}, []),
        (NAME, 80, {"local": 8}, ["8 bytes or instructions of local memory"]), (NAME, 80, {"registers": 40}, ["registers: 104, was 64"]),
        (NAME, 90, {"shared": 16}, ["shared: 29200, was 29184"]), (NAME, 80, {"shared": 1 << 20}, ["bytes of shared memory", "shared: "]),
        (NAME, 100, {"instructions": 100}, ["instructions: "]), (NAME, 100, {"narrow": 6}, ["narrow: 60, was 54"]),
        (NAME, 100, {"wide": -12}, ["no 16-byte load", "wide: 0, was 12"]), (NAME, 90, {"torn": 1}, ["1 pieces of assembly whose pairs are no neighbours"]),
        (NAME, 80, {"conversions": 2}, ["conversions of codes"]), (PROMPT, 90, {"matrix": -12}, ["no tensor-core instruction", "matrix: 0, was 12"]),
        (PROMPT, 90, {"matrix": -2}, ["matrix: 10, was 12"]),
    ],
)  # fmt: skip
def test_what_costs_more_than_the_budget_is_named(name: str, target: int, changed: dict[str, int], says: list[str]) -> None:
    pytest.importorskip("triton")
    import triton_budget
    from triton_budget import Cost

    recorded = _recorded()
    known = recorded[name][str(target)]
    cost = Cost(**{**known, **{field: known[field] + more for field, more in changed.items()}})
    found = triton_budget.complaints({name: {str(target): cost}}, recorded)
    assert len(found) == len(says)
    assert all(line.startswith(f"{name}, sm_{target}: ") and words in line for line, words in zip(found, says, strict=True)), found
    assert triton_budget.complaints({name: {str(target): Cost(**known)}}, {}) == [f"{name}, sm_{target}: not in the table: run with --out"]


@pytest.mark.parametrize(
    ("layout", "torn"),
    [
        ("#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>", False), ("#ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 1}>", True),
        ("#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], order = [1, 0]}>", False),
        ("#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [8, 4], order = [1, 0]}>", True),
        ("#ttg.blocked<{sizePerThread = [4, 2], threadsPerWarp = [8, 4], order = [0, 1]}>", True),
        ("#ttg.linear<{register = [[0, 1], [0, 2]], lane = [[1, 0]]}>", False), ("#ttg.linear<{register = [[0, 2], [0, 1]], lane = [[1, 0]]}>", True),
    ],
)  # fmt: skip
def test_assembly_that_would_get_others_than_neighbours_is_found(layout: str, torn: bool) -> None:
    operation = '%w:8 = tt.elementwise_inline_asm "lop3" {constraints = "=r", packed_element = 2 : i32} %a, %b : tensor<64x16xi32, USED>, tensor<64x16xi32, USED> -> x\n'
    named = f"#there = {layout}\n" + operation.replace("USED", "#there")
    assert torn_pairs(named) == ([layout] if torn else [])
    if "dot_op" in layout:  # which stands where it is used
        assert torn_pairs(operation.replace("USED", layout)) == ([layout] if torn else [])
    assert torn_pairs(named.replace("tensor<64x16xi32", "tensor<64xi32")) == ["not understood"]


def test_a_kernel_is_compiled_and_read() -> None:
    """One of each kind; `make test` compiles them all (benchmarks/triton_budget.py)."""
    pytest.importorskip("triton")
    import triton_budget

    costs = triton_budget.compile_all("^w4 16 rows, fp16 g128 zeros|^w8 16 rows, fp8 by channel", 1)
    assert {n: list(row) for n, row in costs.items()} == {"w4 16 rows, fp16 g128 zeros": ["80", "90", "100"], "w8 16 rows, fp8 by channel and token": ["89", "90", "100"]}
    assert triton_budget.complaints(costs, _recorded()) == []
    assert costs["w8 16 rows, fp8 by channel and token"]["90"].matrix > 0
