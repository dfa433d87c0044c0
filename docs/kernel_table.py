"""The table of INT4 kernels, from what `benchmarks/kernel_int4.py --out` left in benchmarks/results, named after the processor (kernel_int4-zen5)."""

from __future__ import annotations

from typing import Any

from speed_table import PROCESSORS

COLUMNS = (
    "processor; instruction set", "inputs", "one row: share of a plain read's speed", "32 rows: times llama.cpp's Q4_0",
    "32 rows with int16 activations: times it", "measured",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Activations rounded to int8, with the fastest instructions of each processor and with AVX2."""
    lines = []
    for name, found in sorted(results.items(), key=lambda item: list(PROCESSORS).index(item[0].partition("-")[2])):
        times = {(r["kernel"], r["size"], r["rows"]): r for r in found["rows"]}
        fastest = found["machine"].split(", ")[1]
        peer = next(r["kernel"] for r in found["rows"] if r["kernel"].startswith("llama.cpp"))
        for isa in dict.fromkeys((fastest, "avx2")):
            for size in dict.fromkeys(r["size"] for r in found["rows"]):
                int8, int16 = (f"int{bits} activations, {isa}" for bits in (8, 16))
                one = times[int8, size, 1]
                faster = [times[peer, size, 32]["microseconds"] / times[kernel, size, 32]["microseconds"] for kernel in (int8, int16)]
                paired = one.get("read_share")  # beside a read of its own
                share = f"{paired:.0%}" if paired else f"{one['weight_bytes_per_second'] / one['read_bytes_per_second']:.0%} (best of each)"
                place = f"{PROCESSORS[name.partition('-')[2]]}; {isa}"
                lines.append(f"| {place} | {size} | {share} | {faster[0]:.1f} | {faster[1]:.1f} | {found['date']} |")
    return "\n".join([HEAD, *lines])
