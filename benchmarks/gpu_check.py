"""Are the GPU kernels right, and how fast, on the GPU of this machine? One call, under ten minutes.

python benchmarks/gpu_check.py [--quick] [--models 1B] [--out benchmarks/results/gpu-check]

First every kernel over odd shapes against fp64, and under compute-sanitizer where that is found (benchmarks/gpu_sanitize.py); then products of 4- and 8-bit weights beside cuBLAS
(fp16, bf16) and beside what memory and tensor cores allow (the ceilings are measured in the same run), attention and sampling beside torch's, quantization here and on the
processor (benchmarks/gpu_quantize.py), every tile of the table for each number of rows, and at last the runtime (benchmarks/gpu_runtime.py). What is not timed runs
in several processes at once (benchmarks/gpu_crew.py). Weights are cold: copies that together exceed the cache. Times are medians, by CUDA events, within CUDA graphs.
Each part has its share of the time (benchmarks/gpu_sections.py): what is not done when it is up is left out and named, and tables are made of the rest.
Exit codes: 0 all right; 1 a kernel or a rounding is wrong, the sanitizer found something, or not every case was run; 3 no GPU or no Triton here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import gpu_quantize
import gpu_runtime
import gpu_sanitize
import torch
from gpu_cases import cases, check
from gpu_crew import Crew
from gpu_sections import Section, run, watched

from qforge.methods.device import computing_on
from qforge.ops.triton import tiles
from qforge.ops.triton.cache import attention, empty_cache
from qforge.ops.triton.linear import TritonW8
from qforge.ops.triton.present import capability, missing
from qforge.ops.triton.products import w4_linear, w8_linear
from qforge.ops.triton.sampling import SamplingRows, most_likely, sample
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.timing import COLD_BYTES, microseconds
from qforge.ops.triton.tune import neighbours, random_weight
from qforge.ops.triton.tuned import Product
from qforge.ops.triton.w4_pack import W4
from qforge.runtime.decode_graphs import cuda_capture
from qforge.runtime.places import Gpu
from qforge.scheme import parse

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
H, B, INT8, FP8 = torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn
SHAPES = ((4096, 4096), (14336, 4096), (28672, 8192))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
LOGITS = ((1, 128256), (64, 128256))  # rows, vocabulary
LIMIT_S = 585  # of all parts: with starting and writing, ten minutes
CONTEXTS = ((1, 4096, 1), (16, 2048, 1), (64, 1024, 1), (1, 4096, 2048), (4, 1024, 1024))  # sequences, tokens of each, queries of each
Timed = Callable[[], Any]


def rounded(scheme: str) -> dict[str, Any]:
    """A scheme's row of gpu_quantize."""
    return next(gpu_quantize.roundings(_card, gpu_quantize.Shape(), (scheme,)))


def calibrated(method: str, scheme: str) -> dict[str, Any]:
    """A method's row of gpu_quantize."""
    return next(gpu_quantize.methods(_card, gpu_quantize.Shape(layers=2, windows=8, steps=25), ((method, scheme),)))


def _card() -> AbstractContextManager[Any]:
    return computing_on(torch.device(DEVICE, 0))


def watched_by(tool: str) -> tuple[str, str]:
    """What a tool of compute-sanitizer says."""
    return next(gpu_sanitize.sanitized((tool,)))


def warm(what: str, *how: Any) -> str:
    """Compile what is timed later: run it once."""
    try:
        _WARM[what](*how)
    except Exception as e:
        return f"{what} {how}: {type(e).__name__}: {e}"[:300]
    return ""


def _warm_products(outputs: int, inputs: int, rows: int, every_tile: bool) -> None:
    w4 = random_weight(Product("w4", outputs, inputs, 128), DEVICE)
    for d in (H, B):
        w4_linear(torch.randn(rows, inputs, device=DEVICE, dtype=d), w4)
    x = torch.randn(rows, inputs, device=DEVICE, dtype=B)
    for name in _eights():
        w8_linear(x, random_weight(Product(f"w8-{name}", outputs, inputs, 0), DEVICE))
    for tile in _candidates(tiles.device_class(capability(torch.device(DEVICE))), rows) if every_tile else ():
        with contextlib.suppress(Exception):  # what does not run is said when it is timed
            w4_linear(x, w4, tile)
    torch.cuda.synchronize()


def _warm_runtime(name: str) -> None:
    """A model of this one's widths with one layer."""
    shape = replace(gpu_runtime.SHAPES[name], layers=1)
    list(gpu_runtime.ours(name, Gpu(torch.device(DEVICE, 0), B), cuda_capture, shape, (False,)))


_WARM: dict[str, Callable[..., Any]] = {
    "products": _warm_products, "runtime": _warm_runtime, "attention": lambda i: _attention(*CONTEXTS[i]), "sampling": lambda: list(samplings()),
}  # fmt: skip


def crew(quick: bool, models: Sequence[str]) -> Crew:
    """Everything that is not timed."""
    shapes = SHAPES[: 1 if quick else 3]
    return Crew({
        "quantization": [*((calibrated, each) for each in reversed(gpu_quantize.CALIBRATED)), *((rounded, (scheme,)) for scheme in gpu_quantize.ROUNDED)],
        "cases": [(check, (name,)) for name, _ in cases()],
        "sanitizer": [(watched_by, (tool,)) for tool in gpu_sanitize.TOOLS] if gpu_sanitize.tool() else [],
        "warm": [
            *((warm, ("products", *shape, rows, not quick)) for shape in shapes for rows in ROWS), *((warm, ("attention", i)) for i in range(len(CONTEXTS))),
            (warm, ("sampling",)), *((warm, ("runtime", name)) for name in models),
        ],
    })  # fmt: skip


def ceilings() -> dict[str, float]:
    """What this GPU was seen to do: bytes read a second (a sum over 1 GiB) and operations a second (fp16 and bf16 products of 8192)."""
    data = torch.ones(1 << 28, device=DEVICE)
    read = data.nbytes / microseconds([lambda: data.sum()] * 4) * 1e6
    found = {"bytes": read}
    for dtype in (H, B):
        a = torch.randn(8192, 8192, device=DEVICE, dtype=dtype)
        found[str(dtype).removeprefix("torch.")] = 2 * 8192**3 / microseconds([lambda a=a: a @ a] * 4) * 1e6
    return found


def linears(most: dict[str, float], quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the table of products."""
    for outputs, inputs in SHAPES[: 1 if quick else 3]:
        packed = _cold(Product("w4", outputs, inputs, 128))
        dense = {d: [torch.randn(outputs, inputs, device=DEVICE, dtype=d) for _ in range(max(2, COLD_BYTES // (outputs * inputs * 2)))] for d in (H, B)}
        eights = {n: _cold(Product(f"w8-{n}", outputs, inputs, 0)) for n in _eights()}
        for rows in ROWS:
            x = {d: torch.randn(rows, inputs, device=DEVICE, dtype=d) for d in (H, B)}
            row: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "rows": rows, "weight_bytes": packed[0].words.nbytes}
            for d in (H, B):
                name = str(d).removeprefix("torch.")
                row[f"cublas_{name}_us"] = microseconds([lambda w=w, a=x[d]: torch.nn.functional.linear(a, w) for w in dense[d]])
                row[f"w4_{name}_us"] = microseconds([lambda w=w, a=x[d]: w4_linear(a, w) for w in packed])
            row |= {f"w8_{n}_us": microseconds([lambda w=w, a=x[B]: w8_linear(a, w) for w in weights]) for n, weights in eights.items()}
            row["floor_us"] = floor(packed[0], rows, most)
            row["of_roofline"] = row["floor_us"] / row["w4_bfloat16_us"]
            row["over_cublas"] = row["cublas_float16_us"] / row["w4_float16_us"]
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            yield row


def swept(quick: bool) -> Iterator[dict[str, Any]]:
    """Times of a W4 product in bf16 with every tile that makes sense for so many rows."""
    of = tiles.device_class(capability(torch.device(DEVICE)))
    for outputs, inputs in SHAPES[: 0 if quick else 3]:
        packed = _cold(Product("w4", outputs, inputs, 128))
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=DEVICE, dtype=B)
            times = {str(astuple(t)): us for t in _candidates(of, rows) if (us := _tried(t, packed, x)) is not None}
            yield {"outputs": outputs, "inputs": inputs, "rows": rows, "us": times}


def _cold(product: Product) -> list[Any]:
    """Weights that together exceed the cache."""
    each = product.outputs * product.inputs // (2 if product.kernel == "w4" else 1)
    return [random_weight(product, DEVICE) for _ in range(max(2, COLD_BYTES // each))]


def floor(w: W4, rows: int, most: dict[str, float]) -> float:
    """Microseconds that memory or tensor cores need at least for a W4 product."""
    moved = w.words.nbytes + w.scales.nbytes + 2 * rows * (w.in_features + w.out_features)
    return max(moved / most["bytes"], 2 * rows * w.in_features * w.out_features / most["bfloat16"]) * 1e6


def _candidates(of: int, rows: int) -> list[Tile]:
    """Every shipped tile that makes sense for so many rows, and its neighbours."""
    shipped = {t for _, t in tiles.W4_GEMM[of] if t.m <= max(16, 2 * rows)}
    near = {n for n in neighbours(tiles.tile_for(tiles.W4_GEMM[of], rows)) if n.k == tiles.W4_GEMM[of][0][1].k and n.m <= max(16, 2 * rows)}
    return sorted(shipped | near, key=astuple)


def _tried(tile: Tile, packed: list[W4], x: torch.Tensor) -> float | None:
    """Microseconds, or None for a tile that this GPU or compiler does not take."""
    try:
        return microseconds([lambda w=w: w4_linear(x, w, tile) for w in packed], 7)
    except Exception as e:
        print(f"{tile}: {type(e).__name__}: {str(e)[:200]}", flush=True)
        return None


def _eights() -> list[str]:
    """Types of 8 bits that this GPU multiplies."""
    return [n for n, text in (("int8", "int8-channel-sym+int8-token"), ("fp8", "fp8-e4m3-channel+fp8-e4m3-token")) if TritonW8().supports(parse(text), (64, 128), DEVICE) is None]


def attentions() -> Iterator[dict[str, Any]]:
    """Decoding and prompts beside torch's scaled_dot_product_attention on contiguous keys of the same shape."""
    for sequences, context, queries in CONTEXTS:
        row = {"sequences": sequences, "context": context, "queries": queries, **_attention(sequences, context, queries)}
        print({k: round(v, 3) for k, v in row.items()}, flush=True)
        yield row


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
        if kind is FP8 and "fp8" not in _eights():
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


def samplings() -> Iterator[dict[str, float]]:
    """Top-p among a vocabulary beside torch's (sort, softmax, sums, search), and the largest logit beside torch's."""
    for rows, vocabulary in LOGITS:
        logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
        how = SamplingRows.of([(0.8, 0, 0.95, 0.0, 1, row) for row in range(rows)], DEVICE)
        number = torch.rand(rows, 1, device=DEVICE)
        calls = {"us": lambda x=logits, h=how: sample(x, h), "torch_us": lambda x=logits, n=number: _torch_top_p(x, n), "greedy_us": lambda x=logits: most_likely(x)}
        times = {name: microseconds([call] * 4) for name, call in (calls | {"torch_greedy_us": lambda x=logits: x.argmax(-1)}).items()}
        print(times, flush=True)
        yield {"rows": rows, "vocabulary": vocabulary, **times}


def _torch_top_p(logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    ordered, tokens = (logits / 0.8).sort(descending=True)
    p = ordered.softmax(-1)
    total = (p * (p.cumsum(-1) - p < 0.95)).cumsum(-1)
    return tokens.gather(1, torch.searchsorted(total, number * total[:, -1:]).clamp(max=logits.shape[1] - 1))


def claims(r: dict[str, Any]) -> list[tuple[str, str, bool | None]]:
    """What the kernels were made for: the claim, what was measured (the worst case), and whether it holds; None where nothing was measured."""
    large = [x["of_roofline"] for x in r["linears"] if x["rows"] == 1 and x["weight_bytes"] >= 30e6]
    few, many = ([x["over_cublas"] for x in r["linears"] if low <= x["rows"] <= high] for low, high in ((1, 16), (128, 256)))
    attention = [x["of_sdpa_speed"] for x in r["attention"]]
    served = {x["model"]: x for x in gpu_runtime.summary(r["runtime"])}
    graphs, alone, batch = ([x[n] for x in (served.get("1B", {}),) if n in x] for n in ("recording_divides_by", "times_one_by_one", "times_one_batch"))
    limits = (
        ("W4A16, one row, 30 MB and more: part of the memory's speed", large, 0.6), ("W4A16, 1 to 16 rows: times cuBLAS fp16", few, 3.0),
        ("W4A16, 128 to 256 rows: times cuBLAS fp16", many, 0.85), ("paged attention: part of torch's speed", attention, 0.8),
        ("1B, a token of one sequence: recorded steps divide its time by", graphs, 2.0), ("1B, 64 requests: times transformers one by one", alone, 10.0),
        ("1B, 64 requests: times transformers in one batch", batch, 3.0),
    )  # fmt: skip
    found: list[tuple[str, str, bool | None]] = [(f"{what}, >= {least:g}", f"{min(v):.2f}" if v else "", min(v) >= least if v else None) for what, v, least in limits]
    for what, rows in (("plain rounding equals the processor's bit for bit", True), ("methods with calibration lose as much as on the processor", False)):
        right = [x["right"] for x in r["quantization"] if (x["what"] == "rounding") is rows]
        found.append((what, f"{sum(right)} of {len(right)}" if right else "", all(right) if right else None))
    return found


def markdown(r: dict[str, Any]) -> str:
    """The tables to read."""
    wrong = [c["case"] for c in r["cases"] if not c["right"]]
    lines = [
        f"# GPU kernels on {r['device']}", "",
        f"Made by benchmarks/gpu_check.py on {r['date']}, commit {r['commit']}, driver {r['driver']}, CUDA {r['cuda']}, torch {r['torch']}, Triton {r['triton']}.", "",
        f"Right: {len(r['cases']) - len(wrong)} of {len(r['cases'])} cases. " + ("Wrong: " + "; ".join(wrong) if wrong else ""), "",
        "compute-sanitizer: " + (", ".join(f"{name} {'clean' if said == 'clean' else 'NOT CLEAN'}" for name, said in r["sanitizer"]) or "not run") + ".", "",
        *(f"Not whole: {name}: {why}." for name, why in r["unfinished"].items()), "",
        *_table(("claim", "measured", "holds"), [(what, said, {True: "yes", False: "NO", None: "not measured"}[holds]) for what, said, holds in claims(r)]),
        *(f"Ceilings measured here: {c['bytes'] / 1e12:.2f} TB/s, {c['bfloat16'] / 1e12:.0f} TFLOP/s in bf16." for c in r["ceilings"]), "",
    ]  # fmt: skip
    best = {(x["outputs"], x["inputs"], x["rows"]): min(x["us"], key=x["us"].get) for x in r["tiles"] if x["us"]}
    lines += _table(
        ("outputs x inputs", "rows", "W4 bf16 us", "of roofline", "cuBLAS fp16 us", "W4 over cuBLAS", "INT8 us", "FP8 us", "best tile"),
        [
            (
                f"{x['outputs']} x {x['inputs']}", x["rows"], _us(x, "w4_bfloat16_us"), f"{x['of_roofline']:.0%}", _us(x, "cublas_float16_us"), f"{x['over_cublas']:.2f}",
                _us(x, "w8_int8_us"), _us(x, "w8_fp8_us"), best.get((x["outputs"], x["inputs"], x["rows"]), ""),
            )
            for x in r["linears"]
        ],
    )  # fmt: skip
    lines += _table(
        ("sequences", "context", "queries", "bf16 us", "int8 us", "fp8 us", "torch us", "of torch's speed"),
        [(x["sequences"], x["context"], x["queries"], *(_us(x, n) for n in ("bf16_us", "int8_us", "fp8_us", "sdpa_us")), f"{x['of_sdpa_speed']:.0%}") for x in r["attention"]],
    )
    lines += _table(
        ("rows of logits", "vocabulary", "top-p us", "torch us", "greedy us", "torch us"),
        [(x["rows"], x["vocabulary"], *(_us(x, n) for n in ("us", "torch_us", "greedy_us", "torch_greedy_us"))) for x in r["sampling"]],
    )
    lines += _table(
        ("method", "scheme", "KL here", "KL on the processor", "noise", "codes equal"),
        [(x["what"], x["scheme"], *(f"{x[n]:.4f}" for n in ("kl_there", "kl_here", "noise")), f"{x['codes_equal']:.1%}") for x in r["quantization"] if "kl_here" in x],
    )
    lines += _table(
        ("model", "engine", "weights", "recorded", "batch", "ms a token", "tokens/s"),
        [
            (x["model"], x["engine"], x["scheme"], x.get("recorded", ""), x["batch"], f"{x['ms']:.2f}", f"{x['tokens_per_second']:.0f}")
            for x in r["runtime"]
            if x["what"] == "decode"
        ],
    )
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)] + [""] if rows else []


def _us(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.1f}" if name in row else ""


def _said(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


def facts() -> dict[str, Any]:
    """What the figures were measured with."""
    import triton

    return {
        "device": torch.cuda.get_device_name(), "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), "cuda": torch.version.cuda,
        "torch": torch.__version__, "triton": triton.__version__, "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
    }  # fmt: skip


def sections(quick: bool, models: Sequence[str] = tuple(gpu_runtime.SHAPES)) -> list[Section]:
    """All parts, and the seconds that each may take."""
    together = crew(quick, models)

    def alone() -> Iterator[dict[str, float]]:
        together.end()
        yield ceilings()

    return [
        Section("cases", 150, lambda found, left: together.rows("cases", left)),
        Section("sanitizer", 60, lambda found, left: together.rows("sanitizer", left)),
        Section("quantization", 60, lambda found, left: together.rows("quantization", left)),
        Section("warm", 40, lambda found, left: together.rows("warm", left)),
        Section("ceilings", 10, lambda found, left: alone()),
        Section("linears", 50, lambda found, left: linears(found["ceilings"][0], quick)),
        Section("attention", 15, lambda found, left: attentions()),
        Section("sampling", 10, lambda found, left: samplings()),
        Section("tiles", 30, lambda found, left: swept(quick)),
        Section("runtime", 130, lambda found, left: gpu_runtime.measure(models)),
    ]


def left_out(name: str, found: dict[str, Any]) -> str | None:
    """Nothing is timed that is wrong."""
    timed = name in ("linears", "attention", "sampling", "runtime", "tiles")
    return "a kernel is wrong" if timed and not all(c["right"] for c in found["cases"]) else None


def verdict(r: dict[str, Any]) -> int:
    """The exit code."""
    right = bool(r["cases"]) and all(x["right"] for x in (*r["cases"], *r["quantization"])) and {"cases", "quantization", "sanitizer"}.isdisjoint(r["unfinished"])
    return 0 if right and all(said == "clean" for _, said in r["sanitizer"]) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, no tiles beside the shipped ones")
    parser.add_argument("--models", nargs="+", choices=tuple(gpu_runtime.SHAPES), default=tuple(gpu_runtime.SHAPES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-check")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="end after so many, with what was found by then")
    parser.add_argument("--regardless", action="store_true", help="time what is wrong, too")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # the process that runs the sections, and where it writes
    args = parser.parse_args()
    if args.rows:
        run(sections(args.quick, args.models), args.rows, (lambda name, found: None) if args.regardless else left_out)
        return 0
    reason = missing(DEVICE) if torch.cuda.is_available() else "torch finds no NVIDIA GPU"
    if reason:
        print(f"nothing was checked: {reason}", file=sys.stderr)
        return 3
    rows = args.out.with_suffix(".rows")
    result = facts() | {s.name: [] for s in sections(args.quick, args.models)} | {"unfinished": {}}
    options = [name for name, wanted in (("--quick", args.quick), ("--regardless", args.regardless)) if wanted]
    options += ["--models", *args.models]
    result |= watched([sys.executable, __file__, "--rows", str(rows), *options], rows, args.seconds)
    rows.unlink(missing_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps({**result, "claims": claims(result)}, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return verdict(result)


if __name__ == "__main__":
    sys.exit(main())
