"""What does every shipped configuration of the GPU kernels cost in machine code? Compiled for GPUs that need not be here; registers, spills, shared memory, loads and
tensor-core instructions are read from it, printed, and held to the table in benchmarks/results.

python benchmarks/triton_budget.py [--jobs N] [--only REGEX] [--out benchmarks/results/triton-budget]

Needs the package triton. Exits 1 where a configuration breaks a rule (`broken`), costs more than the table says (`worse`), or is missing in one of the two. With --out the table
is written instead. None of this is a time: only a GPU tells those (benchmarks/gpu_check.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from qforge.ops.triton import tiles
from qforge.ops.triton.device import attention, pointwise, sampling, w4, w8
from qforge.ops.triton.offline import SHARED_MEMORY, Cost, Variant, compile_for, cost_table
from qforge.ops.triton.products import DENSE_TILE, constants_w4
from qforge.ops.triton.sampling import BLOCK, CHOICE_WARPS, CHUNK, FEWEST
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.variants import LIMIT, TYPES, variant, w4_variant, w8_variant

TABLE = Path(__file__).resolve().parent / "results/triton-budget.json"
ALLOWED_GROWTH = 1.1  # of instructions, before a compiler or a change of ours is said to have made a kernel worse


def variants(of: int) -> Iterator[Variant]:
    """All that is shipped for a class of devices."""
    yield from _w4(of)
    yield from _w8(of)
    yield from _attention(of)
    yield from _pointwise()
    yield from _sampling()


def _w4(of: int) -> Iterator[Variant]:
    kinds = [("fp16", 128, True), ("bf16", 128, False), ("fp16", 32, True), ("bf16", 0, True)]
    for kind, group, zeros in kinds:
        name = f"{kind} {f'g{group}' if group else 'channel'}{' zeros' if zeros else ''}"
        for most, tile in tiles.W4_GEMM[of]:
            for split in (False, True) if tile.parts > 1 else (False,):
                yield w4_variant(f"w4 {most} rows{' in parts' if split else ''}, {name}", tile, kind, group, zeros, split)
        dense = {**constants_w4(group, zeros), "EVEN_K": True, "BN": DENSE_TILE}
        yield variant(f"w4 to 16 bits, {name}", w4.w4_dense, Tile(1, DENSE_TILE, 128, 4, 1), dense, y=TYPES[kind], scales="*fp16")
    yield w4_variant("w4 16 rows, bf16 g128 bias", tiles.W4_GEMM[of][0][1], "bf16", 128, False, False, bias=True)


def _w8(of: int) -> Iterator[Variant]:
    for number, group, input_group in (("int8", 0, 0), ("fp8", 0, 0), ("fp8", 128, 128)):
        codes, name = TYPES[number], f"{number} {'by block and group' if group else 'by channel and token'}"
        for most, tile in (tiles.W8_GROUPED if group else tiles.W8_GEMM)[of]:
            yield w8_variant(f"w8 {most} rows, {name}", tile, number, group, input_group)
        if not group:
            constants = {"LIMIT": LIMIT[number], "INT": number == "int8", "BLOCK": 4096}
            yield variant(f"round rows, {number}", w8.round_rows, Tile(1, 4096, 0, 4, 1), constants, x="*bf16", codes=codes, scales="*fp32")


def _attention(of: int) -> Iterator[Variant]:
    for stored in ("bf16", "int8", "fp8"):
        for what, queries, parts in (("decode", 4, 1), ("decode in parts", 4, 4), ("prompt", 2048, 1)):
            for size, window in ((128, False), (64, True), (256, True)):
                tile = tiles.attention_tile(of, size, queries, stored != "bf16")
                constants = {
                    "HEADS": 32, "CACHE_HEADS": 8, "D": size, "DP": size, "PAGE": 16, "QUANTIZED": stored != "bf16", "WINDOW": window, "PARTS": parts, "LARGE": False,
                    "BM": tile.m, "TILE": tile.n,
                }  # fmt: skip
                name = f"attention {what}, {stored}, head {size}{' window' if window else ''}"
                kept = TYPES[stored]
                yield variant(name, attention.paged_attention, tile, constants, matrix=True, q="*bf16", keys=kept, values=kept, out="*fp32" if parts > 1 else "*bf16")
    yield variant("attention merge", attention.merge_parts, Tile(1, 0, 0, 1, 1), {"D": 128, "DP": 128, "PARTS": 4}, out="*bf16")


def _pointwise() -> Iterator[Variant]:
    for number in ("bf16", "int8", "fp8"):
        scaled = {"LIMIT": LIMIT.get(number, 0.0), "INT": number == "int8"}
        kinds = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "scales": "*fp32"}
        if number == "bf16":
            wide = {**kinds, "residual": "*fp32", "weight": "*fp32"}
            yield variant("add and norm, fp32 residual", pointwise.rms_norm, Tile(1, 0, 0, 8, 1), {**scaled, "ADD": True, "BLOCK": 4096}, y=TYPES[number], **wide)
        yield variant(f"add and norm, {number}", pointwise.rms_norm, Tile(1, 0, 0, 8, 1), {**scaled, "ADD": True, "BLOCK": 4096}, y=TYPES[number], **kinds)
        for norm in (False, True):
            heads = {"NORM": norm, "HEADS": 32, "CACHE_HEADS": 8, "D": 128, "HALF": 64}
            cached = {"qkv": "*bf16", "q": "*bf16", "keys": TYPES[number], "values": TYPES[number]}
            for calibrated in (False, True) if number == "fp8" else (False,):
                name = f"{'norm, ' if norm else ''}rope and {'calibrated ' if calibrated else ''}cache, {number}"
                yield variant(name, pointwise.rope_and_cache, Tile(1, 0, 0, 1, 1), {**scaled, **heads, "CALIBRATED": calibrated}, **cached)
    yield variant("silu mul", pointwise.silu_mul, Tile(1, 1024, 0, 4, 1), {"BLOCK": 1024}, gate_up="*bf16", y="*bf16")


def _sampling() -> Iterator[Variant]:
    tile, chunked = Tile(1, CHUNK, 0, 8, 1), {"CHUNK": CHUNK}
    kinds = {"positions": "*i64"}
    yield variant("sort chunks of logits", sampling.sort_chunks, tile, chunked, **kinds)
    for power in (FEWEST, 2 * FEWEST):  # vocabularies up to 131,072 and 262,144 tokens
        yield variant(f"sum chunks of logits, {power}", sampling.sum_chunks, tile, {**chunked, "NP": power}, **kinds)
        yield variant(f"choose tokens, {power}", sampling.choose, replace(tile, warps=CHOICE_WARPS), {**chunked, "NP": power}, **kinds)
    yield variant("most likely token", sampling.most_likely, tile, {"BLOCK": BLOCK}, **kinds)


def target_of(v: Variant, of: int) -> int:
    """The capability to compile for: 8-bit floats begin at 89."""
    return 89 if of == 80 and "fp8" in v.name else of


def broken(v: Variant, cost: Cost, target: int) -> list[str]:
    """Which rules a variant breaks, in words."""
    rules = {
        f"{cost.local} bytes or instructions of local memory": cost.local == 0,
        f"{cost.torn} pieces of assembly whose pairs are no neighbours": cost.torn == 0,
        f"{cost.shared} bytes of shared memory": cost.shared <= SHARED_MEMORY[target],
        "no tensor-core instruction": cost.matrix > 0 or not v.tensor_cores,
        "no 16-byte load": cost.wide > 0 or not v.name.startswith(("w4", "w8", "attention d", "attention p")),
        f"{cost.conversions} conversions of codes": cost.conversions <= 1 or not v.name.startswith("w4"),
    }
    return [words for words, kept in rules.items() if not kept]


def worse(cost: Cost, recorded: dict[str, int]) -> list[str]:
    """Where a variant now costs more than the table says."""
    pairs = {"registers": 1.15, "shared": 1.0, "instructions": ALLOWED_GROWTH, "narrow": ALLOWED_GROWTH}
    found = [f"{n}: {getattr(cost, n)}, was {recorded[n]}" for n, growth in pairs.items() if getattr(cost, n) > recorded[n] * growth + (8 if n == "registers" else 0)]
    return found + [f"{n}: {getattr(cost, n)}, was {recorded[n]}" for n in ("matrix", "wide") if getattr(cost, n) < recorded[n] * 0.9]


def rows(costs: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """The lines of the table."""
    lines = ["| variant | target | registers | spills | shared KiB | instructions | tensor cores | loads of 16 bytes | smaller loads |", "|---|---|---|---|---|---|---|---|---|"]
    for name, row in costs.items():
        for target, c in row.items():
            cells = (c["registers"], c["local"], f"{c['shared'] / 1024:.1f}", c["instructions"], c["matrix"], c["wide"], c["narrow"])
            lines.append(f"| {name} | sm_{target} | " + " | ".join(map(str, cells)) + " |")
    return lines


def markdown(table: dict[str, Any]) -> str:
    """The table to read."""
    lines = [f"# Machine code of the GPU kernels (Triton {table['triton']})", "", "Made by benchmarks/triton_budget.py, without a GPU: costs, not times.", ""]
    return "\n".join([*lines, *rows(table["costs"])]) + "\n"


def complaints(costs: dict[str, dict[str, Cost]], recorded: dict[str, dict[str, dict[str, int]]] | None) -> list[str]:
    """What is wrong with what was compiled, by itself and beside a table (None: none to compare with), in words."""
    found = []
    for of in tiles.CLASSES:
        for v in variants(of):
            target = target_of(v, of)
            cost = costs.get(v.name, {}).get(str(target))
            if cost is None:
                continue
            words = broken(v, cost, target)
            if recorded is not None:
                known = recorded.get(v.name, {}).get(str(target))
                words += ["not in the table: run with --out"] if known is None else worse(cost, known)
            found += [f"{v.name}, sm_{target}: {w}" for w in words]
    return found


def gone(recorded: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """Rows of the table that stand for nothing that is shipped."""
    shipped = {(v.name, str(target_of(v, of))) for of in tiles.CLASSES for v in variants(of)}
    return [f"{name}, sm_{target}: in the table, and not shipped" for name, row in recorded.items() for target in row if (name, target) not in shipped]


def _compiled(of: int, name: str) -> tuple[str, str, Cost]:
    v = next(v for v in variants(of) if v.name == name)
    return name, str(target_of(v, of)), compile_for(v, target_of(v, of))


def compile_all(only: str, jobs: int) -> dict[str, dict[str, Cost]]:
    """Costs by variant and target, compiled in so many processes."""
    todo = [(of, v.name) for of in tiles.CLASSES for v in variants(of) if re.search(only, v.name)]
    costs: dict[str, dict[str, Cost]] = {name: {} for _, name in todo}
    with contextlib.ExitStack() as stack:
        each: Any = map
        if jobs > 1:
            each = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))).map
        for name, target, cost in each(_compiled, *zip(*todo, strict=True)):
            costs[name][target] = cost
    return costs


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    costs = compile_all(args.only, args.jobs)
    recorded = None if args.out else json.loads(TABLE.read_text())["costs"]
    wrong = complaints(costs, recorded) + ([] if recorded is None else gone(recorded))
    print(*rows(cost_table(costs)), sep="\n")
    print(f"{sum(map(len, costs.values()))} configurations compiled with Triton {triton.__version__}: {'NOT within the budget' if wrong else 'within the budget'}")
    print(*wrong, sep="\n")
    if args.out:
        kept = {n: row for n, row in json.loads(TABLE.read_text())["costs"].items() if args.only}
        table = {"triton": triton.__version__, "costs": kept | cost_table(costs)}
        args.out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(table))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
