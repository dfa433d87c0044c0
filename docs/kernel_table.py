"""The table of INT4 kernels, from what `benchmarks/kernel_int4.py --out` left in benchmarks/results, named after the processor (kernel_int4-zen5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from speed_table import PROCESSORS

COLUMNS = (
    "processor; instruction set", "inputs", "one row: share of a plain read's speed", "32 rows: times llama.cpp's Q4_0",
    "32 rows with int16 activations: times it", "measured",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


@dataclass(frozen=True)
class Kernel:
    """One line: one row as a share of a plain read's speed (`paired`: beside a read of its own), 32 rows of int8 and of int16 activations as multiples of llama.cpp's speed."""

    processor: str
    isa: str
    size: int
    share: float
    paired: bool
    faster: tuple[float, float]
    date: str


def table(results: dict[str, dict[str, Any]]) -> str:
    """Activations rounded to int8, with the fastest instructions of each processor and with AVX2."""
    return "\n".join([HEAD, *map(_line, _measured(results))])


def sentence(results: dict[str, dict[str, Any]]) -> str:
    """From the least to the most of what the table has."""
    kernels = list(_measured(results))
    parts = [k for k in kernels if k.isa != "avx2"], [k for k in kernels if k.isa == "avx2"]
    shares = [_ranged([100 * k.share for k in part], 0) for part in parts]
    times = [_ranged([k.faster[0] for k in part], 1) for part in parts]
    return (
        f"One row of INT4 weights with int8 activations is read at {shares[0]} % of the speed of a plain read of memory (with AVX2 alone {shares[1]} %), "
        f"32 rows run at {times[0]} times the rate of llama.cpp's kernel (with AVX2 alone {times[1]})."
    )


def _measured(results: dict[str, dict[str, Any]]) -> Iterator[Kernel]:
    for name, found in sorted(results.items(), key=lambda item: list(PROCESSORS).index(item[0].partition("-")[2])):
        times = {(r["kernel"], r["size"], r["rows"]): r for r in found["rows"]}
        fastest = found["machine"].split(", ")[1]
        peer = next(r["kernel"] for r in found["rows"] if r["kernel"].startswith("llama.cpp"))
        for isa in dict.fromkeys((fastest, "avx2")):
            for size in dict.fromkeys(r["size"] for r in found["rows"]):
                int8, int16 = (f"int{bits} activations, {isa}" for bits in (8, 16))
                one = times[int8, size, 1]
                faster = [times[peer, size, 32]["microseconds"] / times[kernel, size, 32]["microseconds"] for kernel in (int8, int16)]
                share = one.get("read_share") or one["weight_bytes_per_second"] / one["read_bytes_per_second"]
                yield Kernel(PROCESSORS[name.partition("-")[2]], isa, size, share, bool(one.get("read_share")), (faster[0], faster[1]), found["date"])


def _line(k: Kernel) -> str:
    share = f"{k.share:.0%}" if k.paired else f"{k.share:.0%} (best of each)"
    return f"| {k.processor}; {k.isa} | {k.size} | {share} | {k.faster[0]:.1f} | {k.faster[1]:.1f} | {k.date} |"


def _ranged(values: list[float], digits: int) -> str:
    least, most = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return least if least == most else f"{least} to {most}"
