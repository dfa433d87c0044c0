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


def _run(objects: list[Path], program: Path, count: int) -> None:
    subprocess.run([str(COMPILER), "-pthread", *map(str, objects), "-o", str(program)], check=True)
    told = subprocess.run([str(program), "0", str(count)], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_products_on_emulated_tiles_have_the_bits_of_plain_code(tmp_path: Path) -> None:
    objects = [
        _compile(ROOT / "tests/native/blockwise_amx_check.cpp", tmp_path / "check.o"),
        _compile(KERNELS / "blockwise_amx.cpp", tmp_path / "amx.o", *EMULATED),
        _compile(KERNELS / "blockwise_avx512_vnni.cpp", tmp_path / "avx512.o"),
        _compile(KERNELS / "blockwise_portable.cpp", tmp_path / "portable.o"),
        _compile(KERNELS / "cache_ahead.cpp", tmp_path / "cache.o"),
    ]
    _run(objects, tmp_path / "check", 300)


def test_attention_on_emulated_tiles_has_the_bits_of_plain_code(tmp_path: Path) -> None:
    objects = [
        _compile(ROOT / "tests/native/attention_amx_check.cpp", tmp_path / "check.o"),
        _compile(KERNELS / "attention_amx.cpp", tmp_path / "amx.o", *EMULATED),
        _compile(KERNELS / "layers_portable.cpp", tmp_path / "portable.o"),
    ]
    _run(objects, tmp_path / "check", 100)


@pytest.mark.skipif(not CPUINFO.is_file() or "avx512_bf16" not in CPUINFO.read_text(), reason="activations are rounded by AVX512-BF16")
def test_products_in_bf16_on_emulated_tiles_have_the_bits_of_plain_code(tmp_path: Path) -> None:
    objects = [
        _compile(ROOT / "tests/native/bf16_amx_check.cpp", tmp_path / "check.o"),
        _compile(KERNELS / "bf16_amx.cpp", tmp_path / "amx.o", *EMULATED),
        _compile(KERNELS / "bf16_portable.cpp", tmp_path / "portable.o"),
        _compile(KERNELS / "layers_portable.cpp", tmp_path / "layers.o"),
    ]
    _run(objects, tmp_path / "check", 200)
