"""What does every shipped kernel in CUDA C++ cost in machine code? Compiled with NVRTC for a GPU that need not be here; registers, spills and matrix instructions are read from it.

python benchmarks/cuda_budget.py

Needs the packages nvidia-cuda-nvrtc (or PyTorch for CUDA) and triton, whose cuobjdump reads machine code. Exits 1 where a kernel spills registers, multiplies without tensor cores,
or has products that the compiler lets wait for each other, or registers that it does not hand over; 3 where something is not installed. None of this is a time: only a GPU tells
those (benchmarks/gpu_check.py).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from qforge.ops.cuda import compiler, w4
from qforge.ops.cuda.source import Source
from qforge.ops.triton.offline import Cost, read_cost

ARCHITECTURE = "sm_90a"
SCHEMES = {  # what decides the code: type of x, of scales, zero points, groups
    "bf16 g128": {"KIND": 1, "SCALE": 0, "ZEROS": 0, "GROUP": 128, "RUNS": 1},
    "fp16 g32 zeros": {"KIND": 0, "SCALE": 0, "ZEROS": 1, "GROUP": 32, "RUNS": 4},
    "fp16 g64 zeros": {"KIND": 0, "SCALE": 0, "ZEROS": 1, "GROUP": 64, "RUNS": 2},
    "bf16 g64 zeros fp32": {"KIND": 1, "SCALE": 2, "ZEROS": 1, "GROUP": 64, "RUNS": 2},
    "bf16 channel zeros": {"KIND": 1, "SCALE": 1, "ZEROS": 1, "GROUP": 0, "RUNS": 1},
}


def shipped() -> Iterator[tuple[str, Source]]:
    """Every kernel as it is launched, with some schemes."""
    for name, constants in SCHEMES.items():
        short = constants["RUNS"] > 2
        for few in w4.FEW_OF_SHORT_GROUPS if short else w4.FEW:
            yield f"few rows, {few.wn} x {few.wk} warps, {name}", w4.few_source(constants, few)
        for many in w4.MANY_OF_SHORT_GROUPS if short else w4.MANY:
            yield f"{many.rows} rows, {name}", w4.many_source(constants, many)


def cost_of(source: Source) -> tuple[Cost, str]:
    """What machine code uses, and what the compiler says about it."""
    code, said = compiler.compile_now(source, ARCHITECTURE, "--ptxas-options=-v")
    return read_cost(code, 0), said


def broken(cost: Cost, said: str) -> list[str]:
    """Which rules a kernel breaks, in words."""
    rules = {
        f"{cost.local} bytes or instructions of local memory": cost.local == 0,
        "no tensor-core instruction": cost.matrix > 0,
        "products wait for each other": "serialized" not in said,
        "registers are not given and taken": "setmaxnreg" not in said,
    }
    return [words for words, kept in rules.items() if not kept]


def main() -> int:
    reason = compiler.missing() or (None if importlib.util.find_spec("triton") else "the package triton is not installed")
    if reason:
        print(f"nothing was compiled: {reason}", file=sys.stderr)
        return 3
    print(f"# Machine code of the kernels in CUDA C++ (NVRTC {compiler.version()}, {ARCHITECTURE})\n")
    print("| kernel | registers | spills | instructions | tensor cores | loads of 16 bytes | smaller loads |\n|---|---|---|---|---|---|---|")
    found = []
    names, sources = zip(*shipped(), strict=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, (cost, said) in zip(names, pool.map(cost_of, sources), strict=True):
            print(f"| {name} | {cost.registers} | {cost.local} | {cost.instructions} | {cost.matrix} | {cost.wide} | {cost.narrow} |", flush=True)
            found += [f"{name}: {words}" for words in broken(cost, said)]
    print("\n" + ("\n".join(found) or "within the budget"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
