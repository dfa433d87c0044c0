"""What does every shipped configuration of the GPU kernels cost in machine code? Compiled for GPUs that need not be here; registers, spills, shared memory, loads and
tensor-core instructions are read from it.

python benchmarks/triton_budget.py [--only TEXT] [--out benchmarks/results/triton-budget]

Needs the package triton. Exits 1 where a configuration breaks a rule (`broken`). None of this is a time: only a GPU tells those (benchmarks/gpu_check.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from qforge.ops.triton import tiles
from qforge.ops.triton.device import attention, pointwise, w4, w8
from qforge.ops.triton.offline import SHARED_MEMORY, Cost, Variant, compile_for, cost_table
from qforge.ops.triton.tiles import Tile

INTEGERS = ("m_rows", "n_rows", "k_columns", "k_words", "k_part", "steps", "span", "columns", "queries", "table_stride", "window", "rows")
POINTERS = {
    "words": "*i32", "zeros": "*u8", "bias": "*fp32", "input_scales": "*fp32", "parts": "*fp32", "key_scales": "*fp32", "value_scales": "*fp32", "tables": "*i32",
    "starts": "*i32", "lengths": "*i32", "most_out": "*fp32", "sum_out": "*fp32", "most_in": "*fp32", "sum_in": "*fp32", "cosines": "*fp32", "sines": "*fp32",
    "positions": "*i32", "slots": "*i64", "scale": "fp32", "epsilon": "fp32",
}  # fmt: skip
ALLOWED_GROWTH = 1.1  # of instructions, before a compiler or a change of ours is said to have made a kernel worse
SHORT = {"fp16": "*fp16", "bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv"}
LIMIT = {"int8": 127.5, "fp8": 448.0}


def variant(name: str, kernel: Any, tile: Tile, constants: dict[str, Any], *, matrix: bool = False, **types: str) -> Variant:
    """A variant whose arguments have their usual types but for `types`."""
    return Variant(name, kernel, {**POINTERS, **dict.fromkeys(INTEGERS, "i32"), **types}, constants, tile.warps, tile.stages, matrix)


def variants(of: int) -> Iterator[Variant]:
    """All that is shipped for a class of devices."""
    yield from _w4(of)
    yield from _w8(of)
    yield from _attention(of)
    yield from _pointwise()


def _w4(of: int) -> Iterator[Variant]:
    kinds = [("fp16", 128, True), ("bf16", 128, False), ("fp16", 32, True), ("bf16", 0, True)]
    for kind, group, zeros in kinds:
        base = {"HAS_ZEROS": zeros, "HAS_BIAS": False, "GROUP": group, "EVEN_K": True}
        name, x = f"{kind} {f'g{group}' if group else 'channel'}{' zeros' if zeros else ''}", SHORT[kind]
        tile = tiles.W4_GEMV[of]
        yield variant(f"w4 1 row, {name}", w4.w4_gemv, tile, {**base, "BN": tile.n, "BW": tile.k // 8}, x=x, y=x, scales="*fp16")
        for most, tile in tiles.W4_GEMM[of]:
            for split in (False, True) if tile.parts > 1 else (False,):
                tile = tiles.with_step(tile, min(tile.k, group or tile.k))
                constants = {**base, "SPLIT": split, "BM": tile.m, "BN": tile.n, "BK": tile.k}
                yield variant(f"w4 {most} rows{' in parts' if split else ''}, {name}", w4.w4_gemm, tile, constants, matrix=True, x=x, y="*fp32" if split else x, scales="*fp16")
    yield variant("add parts", w4.add_parts, Tile(1, 1024, 0, 4, 1), {"S": 4, "HAS_BIAS": True, "BLOCK": 1024}, y="*fp16")


def _w8(of: int) -> Iterator[Variant]:
    for number, group, input_group in (("int8", 0, 0), ("fp8", 0, 0), ("fp8", 128, 128)):
        codes, name = SHORT[number], f"{number} {'by block and group' if group else 'by channel and token'}"
        for i, (most, tile) in enumerate((tiles.W8_GROUPED if group else tiles.W8_GEMM)[of]):
            base = {"GROUP": group, "INPUT_GROUP": input_group, "LIMIT": LIMIT[number], "INT": number == "int8", "HAS_BIAS": False, "EVEN_K": True}
            constants = {**base, "FUSED": i == 0, "SPLIT": tile.parts > 1, "BM": tile.m, "BN": tile.n, "BK": tile.k}
            y = "*fp32" if tile.parts > 1 else "*bf16"
            yield variant(f"w8 {most} rows, {name}", w8.w8_gemm, tile, constants, matrix=True, x="*bf16" if i == 0 else codes, codes=codes, scales="*fp32", y=y)
        if not group:
            constants = {"LIMIT": LIMIT[number], "INT": number == "int8", "BLOCK": 4096}
            yield variant(f"round rows, {number}", w8.round_rows, Tile(1, 4096, 0, 4, 1), constants, x="*bf16", codes=codes, scales="*fp32")


def _attention(of: int) -> Iterator[Variant]:
    for stored in ("bf16", "int8", "fp8"):
        decode = tiles.ATTENTION_DECODE if stored == "bf16" else tiles.ATTENTION_DECODE_8BIT
        for what, tile, parts in (("decode", decode, 1), ("decode in parts", decode, 4), ("prompt", tiles.ATTENTION_PROMPT[of], 1)):
            for size, window in ((128, False), (64, True)):
                constants = {
                    "HEADS": 32, "CACHE_HEADS": 8, "D": size, "DP": size, "PAGE": 16, "QUANTIZED": stored != "bf16", "WINDOW": window, "PARTS": parts, "BM": tile.m, "TILE": tile.n,
                }  # fmt: skip
                name = f"attention {what}, {stored}, head {size}{' window' if window else ''}"
                kept = SHORT[stored]
                yield variant(name, attention.paged_attention, tile, constants, matrix=True, q="*bf16", keys=kept, values=kept, out="*fp32" if parts > 1 else "*bf16")
    yield variant("attention merge", attention.merge_parts, Tile(1, 0, 0, 1, 1), {"D": 128, "DP": 128, "PARTS": 4}, out="*bf16")


def _pointwise() -> Iterator[Variant]:
    for number in ("bf16", "int8", "fp8"):
        scaled = {"LIMIT": LIMIT.get(number, 0.0), "INT": number == "int8"}
        kinds = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "scales": "*fp32"}
        yield variant(f"add and norm, {number}", pointwise.rms_norm, Tile(1, 0, 0, 8, 1), {**scaled, "ADD": True, "BLOCK": 4096}, y=SHORT[number], **kinds)
        heads = {"HEADS": 32, "CACHE_HEADS": 8, "D": 128, "HALF": 64}
        yield variant(
            f"rope and cache, {number}", pointwise.rope_and_cache, Tile(1, 0, 0, 1, 1), {**scaled, **heads}, qkv="*bf16", q="*bf16", keys=SHORT[number], values=SHORT[number]
        )
    yield variant("silu mul", pointwise.silu_mul, Tile(1, 1024, 0, 4, 1), {"BLOCK": 1024}, gate_up="*bf16", y="*bf16")


def target_of(v: Variant, of: int) -> int:
    """The capability to compile for: 8-bit floats begin at 89."""
    return 89 if of == 80 and "fp8" in v.name else of


def broken(v: Variant, cost: Cost, target: int) -> list[str]:
    """Which rules a variant breaks, in words."""
    rules = {
        f"{cost.local} bytes or instructions of local memory": cost.local == 0,
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


def markdown(table: dict[str, Any]) -> str:
    """The table to read."""
    lines = [
        f"# Machine code of the GPU kernels (Triton {table['triton']})", "",
        "Made by benchmarks/triton_budget.py, without a GPU: costs, not times. No variant keeps anything in local memory (spills).", "",
        "| variant | target | registers | shared KiB | instructions | tensor cores | loads of 16 bytes | smaller loads |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in table["costs"].items():
        for target, c in row.items():
            lines.append(f"| {name} | sm_{target} | {c['registers']} | {c['shared'] / 1024:.1f} | {c['instructions']} | {c['matrix']} | {c['wide']} | {c['narrow']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    costs: dict[str, dict[str, Cost]] = {}
    complaints = []
    for of in tiles.CLASSES:
        for v in variants(of):
            if args.only not in v.name:
                continue
            target = target_of(v, of)
            costs.setdefault(v.name, {})[str(target)] = cost = compile_for(v, target)
            complaints += [f"{v.name}, sm_{target}: {words}" for words in broken(v, cost, target)]
            print(f"{v.name}, sm_{target}: {cost}", flush=True)
    print(*complaints, sep="\n")
    if args.out:
        table = {"triton": triton.__version__, "costs": cost_table(costs)}
        args.out.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(table))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
