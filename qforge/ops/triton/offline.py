"""Compile a Triton kernel for a GPU that is not here, and read from the machine code what it will cost."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SHARED_MEMORY = {
    80: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # bytes a block may use (CUDA C++ Programming Guide, table 27); 80 stands for 86 too, which has less than its own 163 KiB


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, compiled one way.

    Attributes:
        name: as tables print it.
        kernel: the function under `triton.jit`.
        types: the type of each argument that is not a constant, in Triton's notation (`*fp16`, `i32`).
        constants: the values of the others.
        tensor_cores: whether the machine code must have matrix instructions.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    tensor_cores: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What the machine code of a variant uses.

    Attributes:
        registers: per thread.
        local: bytes of stack per thread, and instructions that read or write it: spilled registers.
        shared: bytes per block.
        instructions: all of them, padding (NOP) left out.
        matrix: tensor-core instructions.
        wide: loads from global memory of 16 bytes a thread; narrow: of fewer.
        conversions: from integers to floats.
        torn: pieces of assembly that take neighbours of a row together and are given others.
    """

    registers: int
    local: int
    shared: int
    instructions: int
    matrix: int
    wide: int
    narrow: int
    conversions: int
    torn: int = 0


def compile_for(variant: Variant, capability: int) -> Cost:
    """Compile for a compute capability (80, 90, 100). Pointers and integers count as multiples of 16, as they are for real shapes,
    but for those that the kernel does not look at.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types[name] for name in names}
    plain = {p.name for p in variant.kernel.params if p.do_not_specialize} | variant.constants.keys()
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain and (signature[name][0] == "*" or signature[name] == "i32")}
    source = ASTSource(variant.kernel, signature, {(names.index(n),): v for n, v in variant.constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": variant.warps, "num_stages": variant.stages})
    return replace(read_cost(compiled.asm["cubin"], int(compiled.metadata.shared)), torn=len(torn_pairs(compiled.asm["ttgir"])))


def torn_pairs(ttgir: str) -> list[str]:
    """Layouts with which assembly over two elements at a time gets elements that are no neighbours within a row. ttgir: Triton's last form that has layouts."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.M))
    pairs = re.findall(r"elementwise_inline_asm .*?packed_element = 2 : i32.*? : tensor<\d+x\d+xi32, (#\w+(?:\.\w+<\{.*?\}>)?)>", ttgir)
    found = ["not understood"] * (ttgir.count("packed_element = 2 : i32") - len(pairs))
    for used in pairs:
        layout = layouts.get(used, used)
        dot = re.search(r"dot_op<.*kWidth = (\d+)", layout)
        blocked = re.search(r"blocked<\{sizePerThread = \[\d+, (\d+)\].*order = \[1, 0\]", layout)
        linear = re.search(r"linear<\{register = \[\[0, 1\]", layout)
        width = dot or blocked
        if not (linear or (width and int(width[1]) % 2 == 0)):
            found.append(layout)
    return found


def read_cost(cubin: bytes, shared: int) -> Cost:
    """Read registers and instructions with the tools that the triton wheel carries."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    registers, stack = (int(re.findall(pattern, usage)[-1]) for pattern in (r"REG:(\d+)", r"STACK:(\d+)"))
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code, re.M)
    names = [n for n in names if n != "NOP"]

    def count(pattern: str) -> int:
        return sum(1 for n in names if re.match(pattern, n))

    from_memory = count(r"LDG|UTMALDG")
    wide = sum(1 for n in names if n.startswith("UTMALDG") or (n.startswith("LDG") and "128" in n))
    return Cost(
        registers, stack + count(r"LDL|STL"), shared, len(names), count(r"HMMA|HGMMA|QGMMA|IGMMA|IMMA|QMMA|UTCHMMA|UTCQMMA|UTCIMMA|OMMA"), wide, from_memory - wide, count("I2F")
    )


def cost_table(costs: dict[str, dict[str, Cost]]) -> dict[str, dict[str, dict[str, int]]]:
    """JSON of costs by variant and target."""
    return {name: {target: asdict(cost) for target, cost in row.items()} for name, row in costs.items()}


def _cuobjdump(option: str, path: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, path], check=True, capture_output=True, text=True).stdout
