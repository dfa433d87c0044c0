"""How near are the INT4 kernels to what memory and processor allow, and to llama.cpp? Square weights in groups of 128, cold for few rows, beside the speed of reading memory.

Cold: each kernel has copies of the weight that together are twice the last-level cache (128 MiB at least, 1 GiB at most), and takes one after the other; memory is read in a
buffer as large. With a cache of 300 MiB that is 4 GiB in all.

python benchmarks/kernel_int4.py [--threads N] [--size K ...] [--ggml LIBRARY] [--out benchmarks/results/kernel_int4]

--ggml: a shared library that holds ggml (xllamacpp.abi3.so of the xllamacpp wheel, or libggml.so of a llama-cpp-python): its Q4_0 weights, repacked, in the same run.
Wall time: the best of several rounds in turn, of one row's share of the read bandwidth the median. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ggml import Ggml

from qforge import numerics
from qforge.machine_limits import default_threads
from qforge.ops.memory import Arena
from qforge.ops.native import NativeBf16, NativeKernel, NativeRounded, bytes_of
from qforge.ops.native_module import context, instruction_sets
from qforge.ops.native_weight import NativeWeight
from qforge.runtime.read_speed import far_bytes, last_level_cache
from qforge.scheme import parse

ROWS = (1, 8, 32, 128)
LEAST_COLD = 128 << 20
ROUNDS = 15
STEADY = 1.1  # of a round of one row, the slower to the faster read, before and after it; else memory has changed its speed meanwhile, and the round does not count
MORE = 4  # times as many rounds of one row at most, until half of ROUNDS count


def kernels() -> Iterator[tuple[str, str, NativeRounded | NativeBf16 | NativeKernel]]:
    """Ours: name, instruction set, what packs for it."""
    for isa in instruction_sets()[:-1]:
        yield f"int8 activations, {isa}", isa, NativeRounded(8, None, isa)
        yield f"int16 activations, {isa}", isa, NativeRounded(16, None, isa)
        if isa == "amx":
            yield f"both sides in bf16, {isa}", isa, NativeBf16()
    for isa in ("avx512-vnni", "avx2"):
        if isa in instruction_sets():
            yield f"fp32 activations, {isa}", isa, NativeKernel()


def measure(size: int, threads: int, library: str | None) -> list[dict[str, Any]]:
    """Rows of the table for one shape. Reading takes its turn among the products: the memory of a shared machine is half as fast a minute later."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    scheme = parse("int4-g128-sym")
    q = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))
    codes = size * size // 2  # bytes
    cold = far_bytes(LEAST_COLD)
    copies = max(2, -(-cold // codes))
    calls: dict[tuple[str, int], tuple[Callable[[], None], int]] = {}
    layouts: dict[tuple[str, bool], list[NativeWeight]] = {}  # one for all instruction sets, but for products by pairs
    read_bytes: dict[str, int] = {}  # of a weight, by one row
    for name, isa, kernel in kernels():
        runner = context(threads, isa)
        packing = (kernel.name, kernel.code == "avx512-vnni-pairs")
        if packing not in layouts:
            layouts[packing] = _copies(kernel.prepack(q).weight, copies)
        read_bytes[name] = layouts[packing][0].nbytes
        views = [w.view() for w in layouts[packing]]
        for rows in ROWS:
            x, y = torch.randn(rows, size), torch.empty(rows, size)
            some = views if rows <= 8 else views[:2]
            calls[name, rows] = ((lambda r=runner, some=some, x=x, y=y: _each(r, some, x, y)), len(some))
    if library is not None:
        ggml = Ggml(library, threads)
        for rows in ROWS:
            x = torch.randn(rows, size)
            n = copies if rows <= 8 else 2
            run, y = ggml.products(weight.numpy(), x.numpy(), n)
            assert (torch.from_numpy(y) - x @ weight.T).norm() < 0.12 * (x @ weight.T).norm(), "ggml did not multiply"
            name = f"llama.cpp Q4_0 repacked ({' '.join(ggml.features())})"
            calls[name, rows], read_bytes[name] = (run, n), size * size // 32 * 18
    words, reader = np.ones(copies * codes // 8, np.uint64), context(threads)
    shares = {name: list[float]() for name, _ in calls}  # of what was read meanwhile
    best: dict[tuple[str, int], float] = dict.fromkeys(calls, float("inf"))
    reads: list[float] = []

    def take_turn(key: tuple[str, int]) -> None:
        run, n = calls[key]
        before = _read(reader, words) if key[1] == 1 else 0.0
        seconds = _timed(run) / n
        best[key] = min(best[key], seconds)
        if "llama" in key[0]:
            time.sleep(0.3)  # until the threads that it left spinning rest: they would take from the next read and from the next product
        if key[1] == 1:
            around = sorted((before, _read(reader, words)))
            reads.extend(around)
            if around[1] <= STEADY * around[0]:
                shares[key[0]].append(read_bytes[key[0]] / seconds * around[0] / words.nbytes)

    order = list(calls)
    for _ in range(ROUNDS):  # in turn, so that what disturbs the machine disturbs all
        for key in order:
            take_turn(key)
        order = order[5:] + order[:5]  # whoever is first after the rest takes 5 to 8 % longer
    for _ in range(MORE * ROUNDS):
        for key in order:
            if key[1] == 1 and len(shares[key[0]]) < ROUNDS // 2:
                take_turn(key)
    reading = min(reads)
    speed = words.nbytes / reading
    return [
        {
            "size": size, "kernel": k, "rows": m, "microseconds": s * 1e6, "gmac_per_second": m * size * size / s / 1e9,
            "weight_bytes_per_second": read_bytes[k] / s, "read_bytes_per_second": speed, "cold_bytes": copies * codes,
            "read_share": statistics.median(shares[k]) if m == 1 and shares[k] else None, "steady_rounds": len(shares[k]) if m == 1 else None,
        }
        for (k, m), s in best.items()
    ]  # fmt: skip


def _read(reader: Any, words: np.ndarray) -> float:
    """Seconds, the better of two reads."""
    return min(_timed(lambda: reader.read(words.ctypes.data, len(words))) for _ in range(2))


def _copies(weight: NativeWeight, count: int) -> list[NativeWeight]:
    """Each in memory of its own, placed as a model's weights are."""
    arena, parts = Arena(), {name: part for name in ("codes", "scales", "half_scales", "zeros", "code_sums", "pair_sums") if (part := getattr(weight, name)) is not None}
    return [replace(weight, **{name: bytes_of(arena.place(torch.from_numpy(part))) for name, part in parts.items()}) for _ in range(count)]


def _each(runner: Any, views: list[Any], x: torch.Tensor, y: torch.Tensor) -> None:
    linear, numbers = runner.linear, (x.data_ptr(), len(x), x.shape[1], y.data_ptr(), y.shape[1])
    for view in views:
        linear(view, *numbers)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(result: dict[str, Any]) -> Iterator[str]:
    """Markdown."""
    speeds = " and ".join(dict.fromkeys(f"{r['read_bytes_per_second'] / 1e9:.1f}" for r in result["rows"]))
    yield f"# INT4 kernels, group 128, {result['threads']} threads\n"
    cold, cache = min(r["cold_bytes"] for r in result["rows"]) >> 20, result["last_level_cache_bytes"]
    beside = "" if cache is None else f", last-level cache {cache >> 20} MiB"
    yield f"{result['date']}, {result['machine']}. Sequential read in turn with the products: {speeds} GB/s. `{result['command']}`\n"
    yield f"Cold weights and what is read: {cold} MiB{beside}.\n"
    yield "One row: the share of the read bandwidth at which the weight's own bytes come, the median of rounds, each beside the best of two reads before and two"
    yield f"after it{_rounds(result)}."
    yield "Microseconds: the best round. More rows: 10^9 multiplications a second.\n"
    yield "| size | kernel | " + " | ".join(f"{m} row{'s' * (m > 1)}" for m in ROWS) + " |\n|---|---|" + "---|" * len(ROWS)
    for size in dict.fromkeys(r["size"] for r in result["rows"]):
        for kernel in dict.fromkeys(r["kernel"] for r in result["rows"]):
            found = {r["rows"]: r for r in result["rows"] if r["size"] == size and r["kernel"] == kernel}
            share = found[1]["read_share"]
            cells = [f"{found[1]['microseconds']:.0f} us, {'memory was never steady' if share is None else f'{share:.0%}'}"] + [
                f"{found[m]['microseconds']:.0f} us, {found[m]['gmac_per_second']:.0f}" for m in ROWS[1:]
            ]
            yield f"| {size} | {kernel} | " + " | ".join(cells) + " |"


def _rounds(result: dict[str, Any]) -> str:
    kept = [r["steady_rounds"] for r in result["rows"] if r.get("steady_rounds") is not None]
    return f"; {min(kept)} to {max(kept)} rounds count, in which these differ by less than {STEADY - 1:.0%}" if kept else ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--size", type=int, action="append", help="inputs and outputs; repeatable; default 2048 and 4096")
    parser.add_argument("--ggml", metavar="LIBRARY")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    command = f"python benchmarks/kernel_int4.py --threads {args.threads}" + (" --ggml LIBRARY" if args.ggml else "")
    result = {"date": str(datetime.date.today()), "machine": f"{_processor()}, {', '.join(instruction_sets())}", "threads": args.threads, "command": command}
    result["last_level_cache_bytes"] = last_level_cache()
    rows = [r for size in args.size or [2048, 4096] for r in measure(size, args.threads, args.ggml)]
    result |= {"rows": rows}
    text = "\n".join(table(result))
    print(text)
    if args.out is not None:
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
