"""AMX's products and attention on tiles that plain C++ emulates (tests/native): what a CPU without AMX cannot run is run all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qforge.ops.native_module import instruction_sets

ROOT = Path(__file__).parents[3]
CPUINFO = Path("/proc/cpuinfo")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-w", "-pthread", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
TILES = ["-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512bf16"]


def _compile(source: Path, to: Path, *flags: str) -> Path:
    subprocess.run([str(COMPILER), *FLAGS, *flags, "-I", str(ROOT / "kernels/include"), "-c", str(source), "-o", str(to)], check=True)
    return to


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not any(isa.startswith("avx512") for isa in instruction_sets()), reason="what AMX is not made for goes on to AVX-512"),
]
KERNELS = ROOT / "kernels/cpu"
EMULATED = [*TILES, "-include", str(ROOT / "tests/native/emulated_tiles.h")]


needs_bf16 = pytest.mark.skipif(not CPUINFO.is_file() or "avx512_bf16" not in CPUINFO.read_text(), reason="activations are rounded by AVX512-BF16")


@pytest.mark.parametrize(
    ("emulated", "others", "count"),
    [
        ("blockwise_amx", ["blockwise_avx512_vnni", "blockwise_portable", "cache_ahead"], 300),
        ("attention_amx", ["layers_portable"], 100),
        pytest.param("bf16_amx", ["bf16_portable", "layers_portable"], 200, marks=needs_bf16),
    ],
)
def test_emulated_tiles_give_the_bits_of_plain_code(tmp_path: Path, emulated: str, others: list[str], count: int) -> None:
    objects = [_compile(ROOT / f"tests/native/{emulated}_check.cpp", tmp_path / "check.o"), _compile(KERNELS / f"{emulated}.cpp", tmp_path / "amx.o", *EMULATED)]
    objects += [_compile(KERNELS / f"{name}.cpp", tmp_path / f"{name}.o") for name in others]
    program = tmp_path / "check"
    subprocess.run([str(COMPILER), "-pthread", *map(str, objects), "-o", str(program)], check=True)
    told = subprocess.run([str(program), "0", str(count)], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")
