"""Numbers that Python and C++ both have are the same: read from the sources, and where a compiler is there, as it sees them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qforge.methods import scales
from qforge.ops import native, native_cache, packing
from qforge.runtime.native_decoder import _SAMPLING

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
HEADERS = KERNELS / "include" / "qforge"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
NAMED = [
    ("integer.h", "kLongestRun", native.LONGEST_RUN),
    ("layers.h", "kLongestIntegerHead", native_cache.LONGEST_INTEGER_HEAD),
    ("linear.h", "kTile", packing.TILE),
    ("blockwise.h", "kCentered", packing.SEGMENT),
    ("blockwise.h", "kFirstMore", packing._FIRST_MORE),
    ("blockwise.h", "kSecondLess", packing._SECOND_LESS),
    ("blockwise.h", "kPairsMiddle", packing._PAIRS_MIDDLE),
    ("../../quantize/solver.cpp", "kLanes", scales.LANES),
]
SAID = [
    ("bindings/module.cpp", r"in int8 holds heads of at most (\d+) dimensions", native_cache.LONGEST_INTEGER_HEAD),
    ("bindings/module.cpp", r"whole segments of (\d+) inputs around a middle", packing.SEGMENT),
    ("include/qforge/layers.h", r"keys   \[block_size / \d+\]\[head_dim\]\[(\d+)\]", native_cache.LANES),
    ("include/qforge/layers.h", r"value_dim\(\) const \{ return \(head_dim \+ 15\) / (\d+) \* \1; \}", native_cache.LANES),
]
TYPES = {"double": "<f8", "int64_t": "<i8", "uint64_t": "<u8"}


@pytest.mark.parametrize(("file", "name", "value"), NAMED, ids=[n for _, n, _ in NAMED])
def test_a_constant_of_the_kernels_is_pythons(file: str, name: str, value: int) -> None:
    found = re.search(rf"^constexpr int\w*(?: .*,)? {name} = (\d+)[,;]", (HEADERS / file).read_text(), re.MULTILINE)
    assert found, f"{file} has no number {name}"
    assert int(found[1]) == value


@pytest.mark.parametrize(("file", "pattern", "value"), SAID)
def test_what_the_kernels_say_of_a_number_is_pythons(file: str, pattern: str, value: int) -> None:
    assert {int(n) for n in re.findall(pattern, (KERNELS / file).read_text())} == {value}


def test_chunks_that_pairs_leave_out_are_pythons() -> None:
    found = re.search(r"plain_chunk\(int odd, .*return odd \? (.*) : (.*);", (HEADERS / "blockwise.h").read_text())
    assert found
    odd, even = (tuple(int(n) for n in re.findall(r"chunk == (\d+)", side)) for side in found.groups())
    assert (even, odd) == packing._PLAIN_CHUNKS


def test_how_a_row_is_sampled_has_its_fields_in_order() -> None:
    (body,) = re.findall(r"^struct Sampling \{.*?\n(.*?)^\};", (HEADERS / "sampler.h").read_text(), re.MULTILINE | re.DOTALL)
    declared: list[tuple[Any, ...]] = [(name, TYPES[kind]) for kind, names in re.findall(r"(\w+) ([\w, ]+);", body) for name in names.split(", ")]
    assert declared == _SAMPLING.descr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_compiler_sees_the_same_numbers(tmp_path: Path) -> None:
    fields = {name: offset for name, (_, offset) in (_SAMPLING.fields or {}).items()}
    claims = [f"sizeof(Sampling) == {_SAMPLING.itemsize}", *(f"offsetof(Sampling, {name}) == {offset}" for name, offset in fields.items())]
    claims += [f"{name} == {value}" for file, name, value in NAMED if file.endswith(".h")]
    claims += [f"plain_chunk({odd}, {i}) == {str(i in packing._PLAIN_CHUNKS[odd]).lower()}" for odd in range(2) for i in range(packing.SEGMENT // packing.CHUNK)]
    includes = ["cstddef", *(f"qforge/{name}.h" for name in ("blockwise", "integer", "layers", "linear", "sampler"))]
    source = tmp_path / "numbers.cpp"
    source.write_text("\n".join([*(f"#include <{name}>" for name in includes), "using namespace qforge;", *(f'static_assert({c}, "not so");' for c in claims)]))
    done = subprocess.run([str(COMPILER), "-std=c++20", "-fsyntax-only", "-I", str(KERNELS / "include"), str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
