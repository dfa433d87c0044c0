"""Each instruction set beside plain C++ on random cases (tests/native), those that this CPU lacks too: AMX's tiles emulated in plain C++, ARM's products by qemu."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qforge.ops.native_module import instruction_sets

ROOT = Path(__file__).parents[3]
CPUINFO = Path("/proc/cpuinfo")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
COMMON = ["-std=c++20", "-ffp-contract=off", "-w", "-pthread"]
FLAGS = [*COMMON, "-O2", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
TILES = ["-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavx512bf16"]


KERNELS = ROOT / "kernels/cpu"
EMULATED = [*TILES, "-include", str(ROOT / "tests/native/emulated_tiles.h")]
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")
ARM_EMULATOR = shutil.which("qemu-aarch64")
ARM_FLAGS = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread", "-DQFORGE_HAVE_NEON"]


def _compile(source: Path, to: Path, *flags: str, compiler: str | None = COMPILER) -> Path:
    subprocess.run([str(compiler), *flags, "-I", str(ROOT / "kernels/include"), "-c", str(source), "-o", str(to)], check=True)
    return to


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a kernel for this processor, once for each set of flags."""

    @functools.cache
    def made(name: str, *flags: str) -> Path:
        return _compile(KERNELS / f"{name}.cpp", tmp_path_factory.mktemp(name) / f"{name}.o", *flags)

    return made


def _link(objects: list[Path], program: Path, compiler: str | None = COMPILER) -> Path:
    subprocess.run([str(compiler), "-pthread", *map(str, objects), "-o", str(program)], check=True)
    return program


def _assert_says_nothing(*command: str) -> None:
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def _here(isa: str, name: str, *flags: str) -> object:
    return pytest.param(name, ["-O3", "-mfma", *flags], id=isa, marks=pytest.mark.skipif(COMPILER is None or isa not in instruction_sets(), reason=f"no {isa}, or no C++ compiler"))


VNNI = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]
# Flags of what checks are linked with: the same in every check, so that each is compiled once
BESIDE = {
    "blockwise_portable": [*COMMON, "-O2"],
    "cache_ahead": [*COMMON, "-O2"],
    "layers_portable": FLAGS,
    "bf16_portable": FLAGS,
    "blockwise_avx512_vnni": [*COMMON, "-O3", "-mfma", *VNNI],
}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        _here("avx2", "blockwise_avx2", "-mavx2", "-mf16c"),
        _here("avx-vnni", "blockwise_avx_vnni", "-mavx2", "-mf16c", "-mavxvnni"),
        _here("avx512-vnni", "blockwise_avx512_vnni", *VNNI),
        _here("avx512-vnni-pairs", "blockwise_avx512_pairs", *VNNI),
    ],
)
def test_what_runs_here_gives_the_bits_of_plain_code(compiled: Callable[..., Path], tmp_path: Path, name: str, flags: list[str]) -> None:
    objects = [_compile(ROOT / "tests/native/blockwise_check.cpp", tmp_path / "check.o", *COMMON, "-O2", f"-DCHECKED={name}"), compiled(name, *COMMON, *flags)]
    others = ["blockwise_portable", "cache_ahead", *(["blockwise_avx512_vnni"] if name == "blockwise_avx512_pairs" else [])]  # the last: what pairs are not made for
    objects += [compiled(other, *BESIDE[other]) for other in others]
    _assert_says_nothing(str(_link(objects, tmp_path / "check")), "0", "500")


needs_tiles = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not any(isa.startswith("avx512") for isa in instruction_sets()), reason="what AMX is not made for goes on to AVX-512"),
]
needs_compiler_for_arm = pytest.mark.skipif(ARM_COMPILER is None, reason="no C++ compiler for ARM (Debian: g++-aarch64-linux-gnu)")
needs_emulator_of_arm = pytest.mark.skipif(ARM_EMULATOR is None, reason="no emulator of ARM (Debian: qemu-user)")
needs_bf16 = pytest.mark.skipif(not CPUINFO.is_file() or "avx512_bf16" not in CPUINFO.read_text(), reason="activations are rounded by AVX512-BF16")


@pytest.mark.parametrize(
    ("emulated", "check", "others", "count"),
    [
        pytest.param("blockwise_amx", "blockwise_check", ["blockwise_avx512_vnni", "blockwise_portable", "cache_ahead"], 300, marks=needs_tiles),
        pytest.param("attention_amx", "attention_amx_check", ["layers_portable"], 100, marks=needs_tiles),
        pytest.param("bf16_amx", "bf16_amx_check", ["bf16_portable", "layers_portable"], 200, marks=[*needs_tiles, needs_bf16]),
    ],
)
def test_emulated_tiles_give_the_bits_of_plain_code(compiled: Callable[..., Path], tmp_path: Path, emulated: str, check: str, others: list[str], count: int) -> None:
    objects = [
        _compile(ROOT / f"tests/native/{check}.cpp", tmp_path / "check.o", *FLAGS, f"-DCHECKED={emulated}"),
        _compile(KERNELS / f"{emulated}.cpp", tmp_path / "amx.o", *FLAGS, *EMULATED),
    ]
    objects += [compiled(name, *BESIDE[name]) for name in others]
    _assert_says_nothing(str(_link(objects, tmp_path / "check")), "0", str(count))


def _compile_for_arm(folder: Path, source: Path, *flags: str) -> Path:
    return _compile(source, folder / f"{source.stem}.o", *ARM_FLAGS, *flags, compiler=ARM_COMPILER)


def _run_for_arm(program: Path, *arguments: str, cpu: str = "max") -> None:
    _assert_says_nothing(str(ARM_EMULATOR), "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", str(program), *arguments)


NEON = {"blockwise": ["-O3", "-march=armv8.2-a+dotprod"], "linear": ["-O3"]}  # as CMakeLists.txt has them


@pytest.fixture(scope="module")
def neon(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ARM's kernels as object files in one folder."""
    folder = tmp_path_factory.mktemp("arm")
    return {name: _compile_for_arm(folder, KERNELS / f"{name}_neon.cpp", *flags) for name, flags in NEON.items()}


@needs_compiler_for_arm
@needs_emulator_of_arm
@pytest.mark.parametrize(("kernel", "others"), [("blockwise", ["cache_ahead"]), ("linear", [])])
def test_emulated_arm_gives_the_bits_of_plain_code(neon: dict[str, Path], tmp_path: Path, kernel: str, others: list[str]) -> None:
    objects = [_compile_for_arm(tmp_path, ROOT / f"tests/native/{kernel}_check.cpp", "-O1", f"-DCHECKED={kernel}_neon"), neon[kernel]]
    objects += [_compile_for_arm(tmp_path, KERNELS / f"{name}.cpp", "-O2") for name in (f"{kernel}_portable", *others)]
    _run_for_arm(_link(objects, tmp_path / "check", ARM_COMPILER), "0", "300")


@needs_compiler_for_arm
@needs_emulator_of_arm
def test_a_build_for_arm_asks_the_processor(neon: dict[str, Path], tmp_path: Path) -> None:
    """All that CMakeLists.txt compiles for every processor, but Python's view; a Cortex-A53 has no dot products."""
    listed = re.findall(r"kernels/cpu/\w+\.cpp", (ROOT / "CMakeLists.txt").read_text().split("nanobind_add_module(_native")[1].split(")")[0])
    assert "kernels/cpu/context.cpp" in listed
    objects = [_compile_for_arm(tmp_path, ROOT / source, "-O0") for source in (*listed, "tests/native/context_check.cpp")]
    program = _link([*objects, *neon.values()], tmp_path / "build", ARM_COMPILER)
    _run_for_arm(program, "0", "30", "neon-dotprod,portable")
    _run_for_arm(program, "0", "2", "portable", cpu="cortex-a53")
