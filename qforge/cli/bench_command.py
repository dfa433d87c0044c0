"""`qforge bench`: how fast a model runs on the built-in runtime, and how much memory it takes."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import click

from qforge.cli import options
from qforge.files import write_text
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN


@click.command(name="bench")
@click.argument("model")
@click.option("--activations", type=click.Choice(["all", *ACTIVATIONS]), default="all", show_default=True, help=ACTIVATIONS_MEAN)
@click.option(
    "--kv-cache",
    type=click.Choice(["fp32", "fp16", "bf16", "int8", "fp8"]),
    help="How keys and values are stored; fp32 equals the reference; bf16 is multiplied in bf16 too. On a GPU: fp16, int8, fp8. The default is fp8 where MODEL has scales for it, "
    "else fp32, on a GPU fp16.",
)
@options.device
@click.option("--json", "json_path", metavar="FILE", help="Write the figures to a file; - writes only JSON to stdout.")
@click.option("--tune", is_flag=True, help="Instead, find the fastest tiles for MODEL's products on this machine's GPU, and keep them in the cache folder for every later run.")
def command(model: str, activations: str, kv_cache: str | None, device: options.Device, json_path: str | None, tune: bool) -> None:
    """Measure MODEL: prefill and decode speed, time to first token, time per token, memory, loading time, and how much of the memory's bandwidth decoding uses."""
    if tune:
        from qforge.cli.tiles import tune_tiles

        tune_tiles(model, json_path)
        return
    every = list(ACTIVATIONS) if device.name == "cpu" else ["fp"]
    result = _measure(model, every if activations == "all" else [activations], kv_cache, device)
    text = json.dumps(result, indent=1)
    if json_path == "-":
        click.echo(text)
    else:
        if json_path is not None:
            write_text(Path(json_path), text + "\n")
        _show(result)


def _measure(model: str, kinds: list[str], kv_cache: str | None, device: options.Device) -> dict[str, Any]:
    """Times to first token and per token, and the loading time, are those of the first kind."""
    from qforge.ops.native_module import default_threads, instruction_sets
    from qforge.runtime import LLM
    from qforge.runtime.bench import measure, read_bandwidth

    bandwidth = read_bandwidth() if device.name == "cpu" else None
    runs, kernels, seconds, recorded, stored = [], {}, [], None, kv_cache
    for kind in kinds:
        start = time.perf_counter()
        llm = LLM(model, activations=kind, kv_cache=kv_cache, device=device.name, tensor_parallel=device.processes)
        seconds.append(time.perf_counter() - start)
        kernels[kind], recorded, stored = llm.kernels(), llm.recorded, llm.kv_cache
        runs.append(measure(llm, kind, bandwidth))
        del llm
    from qforge.stages.outcome import environment

    machine = {"threads": default_threads(), "instruction_set": next(iter(instruction_sets()), None), "read_bandwidth": bandwidth}
    return {
        "environment": environment()
        | machine
        | {
            "kernels": kernels,
            "kv_cache": stored,
            "device": device.name,
            "tensor_parallel": device.processes,
            "recorded_steps": recorded,
        },
        **{name: [row for run in runs for row in run[name]] for name in ("prefill", "decode")},
        **{name: runs[0][name] for name in ("ttft_ms", "tpot_ms")},
        "peak_rss_bytes": _peak_rss(),
        "load_seconds": seconds[0],
    }


def _show(result: dict[str, Any]) -> None:
    for row in result["prefill"]:
        click.echo(f"prefill  {row['activations']:4s} batch {row['batch']:3d}, {row['tokens']:4d} tokens   {row['tokens_per_second']:9.1f} tokens/s")
    for row in result["decode"]:
        share = "" if row["read_bandwidth_fraction"] is None else f"  {row['read_bandwidth_fraction']:4.0%} of the read bandwidth"
        click.echo(f"decode   {row['activations']:4s} batch {row['batch']:3d}, context {row['context']:4d}  {row['tokens_per_second']:9.1f} tokens/s{share}")
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
        click.echo(f"{name:36s} {result[key]['p50']:9.1f} ms (p99 {result[key]['p99']:.1f})")
    recorded = result["environment"]["recorded_steps"]
    if recorded is not None:
        click.echo(f"decode steps of {', '.join(map(str, recorded['sizes']))} sequences recorded in {recorded['seconds']:.1f} s")
    bandwidth = result["environment"]["read_bandwidth"]
    read = "" if bandwidth is None else f", memory read at {bandwidth / 1e9:.1f} GB/s"
    click.echo(f"loaded in {result['load_seconds']:.1f} s, peak memory {result['peak_rss_bytes'] / 2**20:.0f} MiB{read}")


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
