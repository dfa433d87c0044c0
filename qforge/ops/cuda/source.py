"""The kernels' sources: one for each use, as its constants have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_TYPES = ("f16", "bf16")  # by KIND
_HEADERS = ("primitives.h", "w4_common.h")


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel with its constants.

    Attributes:
        kernel: its name, and the stem of its file.
        constants: macros, sorted by name.
    """

    kernel: str
    constants: tuple[tuple[str, int], ...]

    @staticmethod
    def of(kernel: str, constants: Mapping[str, int]) -> Source:
        """A kernel with these constants."""
        return Source(kernel, tuple(sorted(constants.items())))

    @property
    def options(self) -> tuple[str, ...]:
        """Its constants as the compiler takes them."""
        return tuple(f"-D{name}={value}" for name, value in self.constants)

    @property
    def code(self) -> str:
        """The file."""
        return _read(f"{self.kernel}.cu")

    @property
    def headers(self) -> dict[str, str]:
        """What it includes, by name."""
        rows = dict(self.constants).get("ROWS")
        return {name: _read(name) for name in _HEADERS} | ({} if rows is None else {"wgmma.h": wgmma(rows, _TYPES[dict(self.constants)["KIND"]])})


def wgmma(columns: int, kind: str) -> str:
    """c `[64, columns]` += a `[64, 16]`, in registers, times b `[16, columns]`, in shared memory, of four warps; without `add` it is = (PTX ISA, wgmma.mma_async).

    Generated, since assembly names every register and none of them can be counted by a macro.
    """
    sums = columns // 2
    numbers = [f"%{i}" for i in range(sums + 6)]
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(sums))
    a = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""#pragma once
INLINE void wgmma(float* c, const u32* a, u64 b, int add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, {numbers[-1]}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
               "{{{", ".join(numbers[:sums])}}}, {{{", ".join(numbers[sums : sums + 4])}}}, {numbers[-2]}, p, 1, 1, 0; }}"
               : {outputs} : {a}, "l"(b), "r"(add));
}}
"""


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()
