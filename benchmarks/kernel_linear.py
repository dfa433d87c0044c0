"""How fast is the native linear beside torch's fp32 matrix product? Weights are cold (rotated over more than the last-level cache); the best of several rounds counts.

python benchmarks/kernel_linear.py [--threads N] [--out-features O] [--in-features I] [--scheme S] [--json FILE]

With one thread the figure is the thread's own CPU time, so that a busy machine disturbs little; with more it is wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qforge import numerics
from qforge.ops.native import NativeDense
from qforge.ops.native_module import instruction_sets
from qforge.ops.select import choose
from qforge.scheme import parse

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
COLD_BYTES = 96 << 20
ROUNDS = 8
DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def best(calls: list[Callable[[], torch.Tensor]], clock: Callable[[], float]) -> float:
    """Seconds of one call, in the best round."""
    rounds = []
    for _ in range(ROUNDS):
        start = clock()
        for call in calls:
            call()
        rounds.append((clock() - start) / len(calls))
    return min(rounds)


def copies(bytes_each: int) -> int:
    """How many weights of this size leave none in the last-level cache."""
    return max(2, COLD_BYTES // bytes_each)


def products(name: str, weight: torch.Tensor, threads: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """One product for each copy of the weight."""
    if name == "torch fp32":
        return [lambda x, w=w: x @ w.T for w in [weight.clone() for _ in range(copies(weight.nbytes))]]
    if name in DENSE:
        dense, stored = NativeDense(threads), weight.to(DENSE[name])
        return [lambda x, t=t: dense.run(x, t) for t in [dense.prepack(stored) for _ in range(copies(stored.nbytes))]]
    scheme = parse(name)
    kernel = choose(scheme, (weight.shape[0], weight.shape[1]), threads=threads).kernel
    q = numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme), upper=numerics.super_scales(weight, scheme))
    return [lambda x, p=p: kernel.run(x, p) for p in [kernel.prepack(q) for _ in range(copies(weight.numel() * scheme.bits // 8))]]


def measure(threads: int, out_features: int, in_features: int, schemes: list[str]) -> list[dict[str, object]]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    weight = torch.randn(out_features, in_features)
    rows: list[dict[str, object]] = []
    for name in [*schemes, *DENSE, "torch fp32"]:
        runs = products(name, weight, threads)
        for m in ROWS:
            x = torch.randn(m, in_features)
            seconds = best([lambda f=f, x=x: f(x) for f in runs[: len(runs) if m < 32 else 4]], clock)
            rows.append({"weights": name, "rows": m, "microseconds": seconds * 1e6, "gmac_per_second": m * weight.numel() / seconds / 1e9})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out-features", type=int, default=2048)
    parser.add_argument("--in-features", type=int, default=2048)
    parser.add_argument("--scheme", action="append", help="repeatable; default int4-g128-sym, int8-channel-sym, w8a8-int8, fp8-dynamic and nf4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = measure(args.threads, args.out_features, args.in_features, args.scheme or ["int4-g128-sym", "int8-channel-sym", "w8a8-int8", "fp8-dynamic", "nf4"])
    print(f"{args.out_features} x {args.in_features}, {args.threads} thread(s), {instruction_sets()[0]}; torch {torch.__version__}")
    for r in rows:
        print(f"{r['weights']:16s} {r['rows']:4d} rows {r['microseconds']:10.0f} us {r['gmac_per_second']:7.1f} GMAC/s")
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "shape": [args.out_features, args.in_features], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
