"""Are the GPU kernels right, and how fast, on the GPU of this machine? One call, under ten minutes.

python benchmarks/gpu_check.py [--quick] [--out benchmarks/results/gpu-check]

First every kernel over odd shapes against fp64; then products of 4-bit and 8-bit weights beside cuBLAS (fp16, bf16) and beside what memory and tensor cores
allow (the ceilings are measured in the same run), every tile of the table for each number of rows; then attention beside torch's. Weights are cold: copies that together exceed
the cache. Times are medians, by CUDA events, within CUDA graphs.
Exit codes: 0 all right; 1 a kernel is wrong; 3 no GPU or no Triton here.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from triton_cases import attention_case, linear_case, norm_case, on, quantized, rope_case, rounding_case, silu_case

from qforge.ops.triton import tiles
from qforge.ops.triton.cache import attention, empty_cache
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.ops.triton.present import capability, missing
from qforge.ops.triton.products import w4_linear, w8_linear
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.w4_pack import W4
from qforge.scheme import parse

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
H, B, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
SHAPES = ((4096, 4096), (14336, 4096), (28672, 8192))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
COLD_BYTES = 256 << 20
CONTEXTS = ((1, 4096, 1), (16, 2048, 1), (64, 1024, 1), (1, 4096, 2048), (4, 1024, 1024))  # sequences, tokens of each, queries of each
Timed = Callable[[], Any]


def cases() -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Every kernel over odd shapes: name, case."""
    float8 = capability(torch.device(DEVICE)) >= 89
    for text in ("int4-g128-sym", "int4-g32-asym", "int4-channel-asym", "int4-g64-asym@f32"):
        for rows, shape in ((1, (1000, 1152)), (1, (77, 128)), (2, (333, 640)), (17, (4100, 1024)), (33, (130, 2048)), (65, (257, 384)), (129, (1000, 1152)), (300, (515, 256))):
            for dtype in (H, B):
                yield f"{text}, {rows} x {shape}, {dtype}", lambda t=text, r=rows, s=shape, d=dtype: linear_case(t, r, s, d, DEVICE, bias=True)
    yield "shuffled groups", lambda: linear_case("int4-g128-asym", 5, (500, 1024), H, DEVICE, shuffled=True)
    for text in ("int8-channel-sym+int8-token", "fp8-e4m3-channel+fp8-e4m3-token", "fp8-e4m3-block128+fp8-e4m3-g128"):
        if text.startswith("int8") or float8:
            for rows, shape in ((1, (1000, 1152)), (3, (333, 640)), (7, (130, 4096)), (65, (257, 384)), (300, (515, 1280))):
                yield f"{text}, {rows} x {shape}", lambda t=text, r=rows, s=shape: linear_case(t, r, s, B, DEVICE, bias=True)
            yield f"rounding, {text}", lambda t=text: rounding_case(t, 9, 1280, DEVICE)
    for stored in (None, INT8, FP8) if float8 else (None, INT8):
        for parts in (1, 4):
            many = {"contexts": (1, 700, 513, 1300), "heads": 8, "cache_heads": 2, "size": 128, "parts": parts, "stored": stored}
            yield f"decode, {stored}, {parts} parts", lambda m=many: attention_case(B, DEVICE, queries=(1, 1, 1, 1), **m)
            yield f"prompts, {stored}, {parts} parts", lambda m=many: attention_case(H, DEVICE, queries=(1, 300, 1, 37), window=200, **m)
        yield f"rope, {stored}", lambda s=stored: rope_case(B, DEVICE, s, size=128)
    yield "attention, three heads share", lambda: attention_case(H, DEVICE, heads=9, cache_heads=3, size=80, queries=(1, 30, 50))
    for rounded in (None, INT8, FP8) if float8 else (None, INT8):
        yield f"norm, {rounded}", lambda r=rounded: norm_case(B, DEVICE, True, r, columns=4100)
    yield "silu", lambda: silu_case(B, DEVICE, columns=11008)


def check() -> list[dict[str, Any]]:
    """Each case's error, and whether it is within its tolerance."""
    found = []
    for name, case in cases():
        try:
            error, tolerance = case()
            found.append({"case": name, "error": error, "tolerance": tolerance, "right": error <= tolerance})
        except Exception as e:
            traceback.print_exc()
            found.append({"case": name, "error": f"{type(e).__name__}: {e}"[:500], "right": False})
        print(f"{'right' if found[-1]['right'] else 'WRONG'}  {name}: {found[-1]['error']}", flush=True)
    return found


def microseconds(calls: list[Timed], rounds: int = 15) -> float:
    """Median time of one call, all of them captured one after the other in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return sorted(times[2:])[len(times[2:]) // 2]


def ceilings() -> dict[str, float]:
    """What this GPU was seen to do: bytes read a second (a sum over 1 GiB) and operations a second (fp16 and bf16 products of 8192)."""
    data = torch.ones(1 << 28, device=DEVICE)
    read = data.nbytes / microseconds([lambda: data.sum()] * 4) * 1e6
    found = {"bytes": read}
    for dtype in (H, B):
        a = torch.randn(8192, 8192, device=DEVICE, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * 8192**3 / microseconds([lambda a=a: a @ a] * 4) * 1e6
    return found


def linears(most: dict[str, float], quick: bool) -> list[dict[str, Any]]:
    """Rows of the table of products."""
    of = tiles.device_class(capability(torch.device(DEVICE)))
    found = []
    for outputs, inputs in SHAPES[: 1 if quick else 3]:
        q4 = on(quantized("int4-g128-sym", (outputs, inputs)), DEVICE)
        packed = [TritonW4().prepack(q4) for _ in range(max(2, COLD_BYTES // (outputs * inputs // 2)))]
        dense = {d: [torch.randn(outputs, inputs, device=DEVICE, dtype=d) for _ in range(max(2, COLD_BYTES // (outputs * inputs * 2)))] for d in (H, B)}
        eights = [TritonW8().prepack(on(quantized(t, (outputs, inputs)), DEVICE)) for t in ("int8-channel-sym+int8-token", "fp8-e4m3-channel+fp8-e4m3-token") if _runs(t)]
        for rows in ROWS:
            x = {d: torch.randn(rows, inputs, device=DEVICE, dtype=d) for d in (H, B)}
            row: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "rows": rows}
            for d in (H, B):
                name = str(d).removeprefix("torch.")
                row[f"cublas_{name}_us"] = microseconds([lambda w=w, a=x[d]: torch.nn.functional.linear(a, w) for w in dense[d]])
                row[f"w4_{name}_us"] = microseconds([lambda w=w, a=x[d]: w4_linear(a, w) for w in packed])
            row["w4_tiles_us"] = {} if quick else {str(astuple(t)): us for t in _candidates(of, rows) if (us := _tried(t, packed, x[B])) is not None}
            for w in eights:
                copies = max(2, COLD_BYTES // (outputs * inputs))
                clones = [type(w)(w.codes.clone(), w.scales, w.bias, w.group, w.input_group, w.limit) for _ in range(copies)]
                row["w8_int8_us" if w.is_int else "w8_fp8_us"] = microseconds([lambda w=w, a=x[B]: w8_linear(a, w) for w in clones])
            row["floor_us"] = floor(packed[0], rows, most)
            row["of_roofline"] = row["floor_us"] / row["w4_bfloat16_us"]
            row["over_cublas"] = row["cublas_float16_us"] / row["w4_float16_us"]
            found.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return found


def floor(w: W4, rows: int, most: dict[str, float]) -> float:
    """Microseconds that memory or tensor cores need at least for a W4 product."""
    moved = w.words.nbytes + w.scales.nbytes + 2 * rows * (w.in_features + w.out_features)
    return max(moved / most["bytes"], 2 * rows * w.in_features * w.out_features / most["bfloat16"]) * 1e6


def _candidates(of: int, rows: int) -> list[Tile]:
    """Every shipped tile that makes sense for so many rows, and some that are not shipped."""
    found = {t for table in tiles.W4_GEMM.values() for _, t in table if t.m <= max(16, 2 * rows)}
    few = {Tile(16, 32, 128, 4, 4, 8), Tile(16, 128, 128, 8, 3, 8), Tile(16, 64, 128, 4, 5, 16)} if rows <= 16 else set()
    one = {tiles.W4_GEMV[of], Tile(1, 4, 1024, 4, 2), Tile(1, 16, 512, 4, 2), Tile(1, 4, 2048, 4, 2)} if rows == 1 else set()
    return sorted(found | few | one, key=astuple)


def _tried(tile: Tile, packed: list[W4], x: torch.Tensor) -> float | None:
    """Microseconds, or None for a tile that this GPU or compiler does not take."""
    try:
        return microseconds([lambda w=w: w4_linear(x, w, tile) for w in packed], 7)
    except Exception as e:
        print(f"{tile}: {type(e).__name__}: {str(e)[:200]}", flush=True)
        return None


def _runs(text: str) -> bool:
    return TritonW8().supports(parse(text), (64, 128), DEVICE) is None


def attentions() -> list[dict[str, Any]]:
    """Decoding and prompts beside torch's scaled_dot_product_attention on contiguous keys of the same shape."""
    found = []
    for sequences, context, queries in CONTEXTS:
        found.append({"sequences": sequences, "context": context, "queries": queries, **_attention(sequences, context, queries)})
        print({k: round(v, 3) for k, v in found[-1].items()}, flush=True)
    return found


def _attention(sequences: int, context: int, queries: int) -> dict[str, float]:
    """Times of one shape: 32 heads of 128 over 8, pages of 16 tokens in any order."""
    heads, cache_heads, size, page = 32, 8, 128, 16
    pages = -(-context // page)
    tables = torch.randperm(sequences * pages, device=DEVICE).int().view(sequences, pages)
    starts = torch.arange(sequences + 1, device=DEVICE).int() * queries
    lengths = torch.full((sequences,), context, device=DEVICE, dtype=torch.int32)
    q = torch.randn(sequences * queries, heads, size, device=DEVICE, dtype=B)
    row: dict[str, float] = {}
    for name, kind in (("bf16", B), ("int8", INT8), ("fp8", FP8)):
        if kind is FP8 and not _runs("fp8-e4m3-channel+fp8-e4m3-token"):
            continue
        cache = empty_cache(sequences * pages, page, cache_heads, size, kind, DEVICE)
        if kind is B:
            cache.keys.normal_()
            cache.values.normal_()
        call = functools.partial(attention, q, cache, tables, starts, lengths, longest=queries, longest_context=context, scale=size**-0.5)
        row[f"{name}_us"] = microseconds([call] * 4)
    row["sdpa_us"] = microseconds([_sdpa(q, sequences, queries, context, cache_heads)] * 4)
    return {**row, "of_sdpa_speed": row["sdpa_us"] / row["bf16_us"]}


def _sdpa(q: torch.Tensor, sequences: int, queries: int, context: int, cache_heads: int) -> Timed:
    """The same work for torch: full causal prompts, or queries at the end of a context (as a mask)."""
    heads, size = q.shape[1:]
    query = q.view(sequences, queries, heads, size).transpose(1, 2)
    k, v = (torch.randn(sequences, cache_heads, context, size, device=DEVICE, dtype=B) for _ in range(2))
    causal = queries == context
    mask = None if causal or queries == 1 else torch.ones(queries, context, dtype=torch.bool, device=DEVICE).tril(context - queries)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def markdown(r: dict[str, Any]) -> str:
    """The tables to read."""
    wrong = [c["case"] for c in r["cases"] if not c["right"]]
    lines = [
        f"# GPU kernels on {r['device']}", "",
        f"Made by benchmarks/gpu_check.py on {r['date']}, commit {r['commit']}, driver {r['driver']}, CUDA {r['cuda']}, torch {r['torch']}, Triton {r['triton']}.", "",
        f"Right: {len(r['cases']) - len(wrong)} of {len(r['cases'])} cases. " + ("Wrong: " + "; ".join(wrong) if wrong else ""), "",
        f"Ceilings measured here: {r['ceilings']['bytes'] / 1e12:.2f} TB/s, {r['ceilings']['bfloat16'] / 1e12:.0f} TFLOP/s in bf16.", "",
        "| outputs x inputs | rows | W4 bf16 us | of roofline | cuBLAS fp16 us | W4 over cuBLAS | INT8 us | FP8 us | best tile |", "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for x in r["linears"]:
        best = min(x["w4_tiles_us"], key=x["w4_tiles_us"].get) if x["w4_tiles_us"] else ""
        eights = " | ".join(f"{x[n]:.1f}" if n in x else "" for n in ("w8_int8_us", "w8_fp8_us"))
        w4 = f"{x['w4_bfloat16_us']:.1f} | {x['of_roofline']:.0%} | {x['cublas_float16_us']:.1f} | {x['over_cublas']:.2f}"
        lines.append(f"| {x['outputs']} x {x['inputs']} | {x['rows']} | {w4} | {eights} | {best} |")
    lines += ["", "| sequences | context | queries | bf16 us | int8 us | fp8 us | torch us | of torch's speed |", "|---|---|---|---|---|---|---|---|"]
    for x in r["attention"]:
        stored = " | ".join(f"{x[n]:.1f}" if n in x else "" for n in ("bf16_us", "int8_us", "fp8_us"))
        lines.append(f"| {x['sequences']} | {x['context']} | {x['queries']} | {stored} | {x['sdpa_us']:.1f} | {x['of_sdpa_speed']:.0%} |")
    return "\n".join(lines) + "\n"


def _said(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, no tiles beside the shipped ones")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-check")
    args = parser.parse_args()
    reason = missing(DEVICE) if torch.cuda.is_available() else "torch finds no NVIDIA GPU"
    if reason:
        print(f"nothing was checked: {reason}", file=sys.stderr)
        return 3
    import triton

    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda, "torch": torch.__version__,
        "triton": triton.__version__, "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"), "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "cases": check(), "ceilings": ceilings(), "linears": [], "attention": [],
    }  # fmt: skip
    if all(c["right"] for c in result["cases"]):
        result |= {"linears": linears(result["ceilings"], args.quick), "attention": attentions()}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 0 if all(c["right"] for c in result["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
