"""Does a GPU kernel touch memory that is not its own, read what nobody wrote, or race? NVIDIA's compute-sanitizer over every kernel, on small shapes.

python benchmarks/gpu_sanitize.py          under compute-sanitizer, with each of its tools
python benchmarks/gpu_sanitize.py --bare   what it watches: the small cases themselves

Exit codes: 0 nothing found; 1 a case is wrong or a tool found something; 3 no GPU, no Triton or no compute-sanitizer here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from triton_cases import attention_case, linear_case, norm_case, rope_case, rounding_case, sampling_case, silu_case

from qforge.ops.triton.present import missing
from qforge.ops.triton.tiles import Tile

TOOLS = ("memcheck", "racecheck", "initcheck")
SECONDS = 60  # of one tool
_FOUND = 9  # exit code of the sanitizer
H, B, INT8 = torch.float16, torch.bfloat16, torch.int8


def small(device: str) -> dict[str, Callable[[], tuple[float, float]]]:
    """Every kernel once or twice, odd shapes first: masks and tails are where memory is missed."""
    mixed: dict[str, Any] = {"contexts": (1, 37, 70), "queries": (1, 20, 9)}
    return {
        "w4 row": lambda: linear_case("int4-channel-asym", 1, (20, 72), H, device),
        "w4 rows": lambda: linear_case("int4-g32-asym", 17, (70, 96), B, device, bias=True),
        "w4 parts": lambda: linear_case("int4-g32-asym", 2, (40, 512), B, device, bias=True, tile=Tile(16, 32, 128, 4, 2, 2)),
        "w4 to 16 bits": lambda: linear_case("int4-g16-asym", 200, (70, 144), B, device, bias=True),
        "w8": lambda: linear_case("int8-channel-sym+int8-token", 3, (40, 72), H, device, bias=True),
        "w8 parts": lambda: linear_case("int8-channel-sym+int8-token", 9, (40, 1100), B, device),
        "rounding": lambda: rounding_case("int8-channel-sym+int8-g32", 3, 96, device),
        "attention": lambda: attention_case(H, device, **mixed),
        "attention, window, parts, int8 cache": lambda: attention_case(H, device, **mixed, window=16, parts=2, stored=INT8),
        "rope": lambda: rope_case(H, device, INT8, norms=True),
        "norm": lambda: norm_case(B, device, True, INT8),
        "silu": lambda: silu_case(H, device),
        "sampling": lambda: sampling_case(3000, device, ties=True),
    }


def tool() -> str | None:
    """Where compute-sanitizer is."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))


def sanitized(tools: Sequence[str] = TOOLS) -> Iterator[tuple[str, str]]:
    """By tool: `clean`, or the last lines that it said. Nothing where compute-sanitizer is not found."""
    found = tool()
    for name in tools if found is not None else ():
        command = [found, "--tool", name, "--error-exitcode", str(_FOUND), "--target-processes", "all", sys.executable, __file__, "--bare"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            said = "clean" if done.returncode == 0 else "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        except subprocess.TimeoutExpired:
            said = "not done in its time"
        print(f"{name}: {said}", flush=True)
        yield name, said


def main() -> int:
    if not torch.cuda.is_available() or missing("cuda"):
        print(f"nothing was checked: {missing('cuda') or 'torch finds no NVIDIA GPU'}", file=sys.stderr)
        return 3
    if sys.argv[1:] == ["--bare"]:
        outcomes = {name: case() for name, case in small("cuda").items()}
        wrong = [name for name, (error, tolerance) in outcomes.items() if not error <= tolerance]
        print("wrong: " + ", ".join(wrong) if wrong else "right")
        return 1 if wrong else 0
    found = dict(sanitized())
    if not found:
        print("nothing was checked: compute-sanitizer is not on the PATH nor in $CUDA_HOME/bin (it comes with the CUDA toolkit)", file=sys.stderr)
        return 3
    return 0 if set(found.values()) == {"clean"} else 1


if __name__ == "__main__":
    sys.exit(main())
