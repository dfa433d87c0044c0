"""`qforge bench`: how fast a model runs on the built-in runtime, and how much memory it takes."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qforge.cli import options
from qforge.files import write_text
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN

if TYPE_CHECKING:
    from qforge.stages.meter import Meter


@click.command(name="bench")
@click.argument("model")
@click.option("--activations", type=click.Choice(["all", *ACTIVATIONS]), default="all", show_default=True, help=ACTIVATIONS_MEAN)
@options.kv_cache
@options.device
@options.json_file("Write the figures to a file; - writes only JSON to stdout.")
@click.option("--tune", is_flag=True, help="Instead, find the fastest tiles for MODEL's products on this machine's GPU, and keep them in the cache folder for every later run.")
def command(model: str, activations: str, kv_cache: str | None, device: options.Device, json_file: str | None, tune: bool) -> None:
    """Measure MODEL: prefill and decode speed, time to first token (also that of a new process, from its start), time per token, memory, loading time, and how much of the
    memory's bandwidth decoding uses."""
    if tune:
        from qforge.cli.tiles import tune_tiles

        tune_tiles(model, json_file)
        return
    every = list(ACTIVATIONS) if device.name == "cpu" else ["fp"]
    result = _measure(model, every if activations == "all" else [activations], kv_cache, device)
    text = json.dumps(result, indent=1)
    if json_file == "-":
        click.echo(text)
    else:
        _show(result)
        if json_file is not None:
            write_text(Path(json_file), text + "\n")


def _measure(model: str, kinds: list[str], kv_cache: str | None, device: options.Device) -> dict[str, Any]:
    """Times to first token and per token, and the loading time, are those of the first kind. Memory is read before and after each kind, and the fastest counts: a shared
    machine is half as fast a minute later."""
    from qforge.runtime import LLM
    from qforge.runtime.bench import beside_bandwidth, measure
    from qforge.runtime.new_process import start_to_first_token
    from qforge.runtime.read_speed import read_bandwidth
    from qforge.stages.meter import Meter

    how: dict[str, Any] = {"kv_cache": kv_cache, "device": device.name, "tensor_parallel": device.processes}
    read = read_bandwidth if device.name == "cpu" else lambda: None
    runs, kernels, seconds, recorded, stored, bandwidths, meter = [], {}, [], None, kv_cache, [read()], Meter()
    for kind in kinds:
        with meter.stage(kind):
            start = time.perf_counter()
            llm = LLM(model, activations=kind, **how)
            seconds.append(time.perf_counter() - start)
            kernels[kind], recorded, stored = llm.kernels(), llm.recorded, llm.kv_cache
            runs.append(measure(llm, kind))
        del llm
        bandwidths.append(read())
    _return_memory(device)
    new_process = {"activations": kinds[0], **start_to_first_token(model, {"activations": kinds[0], **how})}
    machine = _machine([b for b in bandwidths if b is not None])
    ran = {"kernels": kernels, "kv_cache": stored, "device": device.name, "tensor_parallel": device.processes, "recorded_steps": recorded}
    return {
        "environment": machine | ran,
        "prefill": [row for run in runs for row in run["prefill"]],
        "decode": [beside_bandwidth(row, machine["read_bandwidth"]) for run in runs for row in run["decode"]],
        **{name: runs[0][name] for name in ("ttft_ms", "tpot_ms")},
        "peak_rss_bytes": _peak_rss(meter),
        "load_seconds": seconds[0],
        "new_process": new_process,
    }


def _machine(bandwidths: list[float]) -> dict[str, Any]:
    """Versions and machine, and how fast its memory was read each time."""
    from qforge.machine_limits import default_threads
    from qforge.ops.native_module import instruction_sets
    from qforge.runtime.read_speed import last_level_cache
    from qforge.stages.outcome import environment

    reading = {"read_bandwidth": max(bandwidths, default=None), "read_bandwidths": bandwidths, "last_level_cache_bytes": last_level_cache()}
    return environment() | {"threads": default_threads(), "instruction_set": next(iter(instruction_sets()), None)} | reading


def _return_memory(device: options.Device) -> None:
    """Release cached GPU memory, because another process is about to need it."""
    if device.name != "cpu":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _show(result: dict[str, Any]) -> None:
    for row in result["prefill"]:
        click.echo(f"prefill  {row['activations']:4s} batch {row['batch']:3d}, {row['tokens']:4d} tokens   {row['tokens_per_second']:9.1f} tokens/s")
    for row in result["decode"]:
        note = "" if row["read_bandwidth_note"] is None else f" ({row['read_bandwidth_note']})"
        share = "" if row["read_bandwidth_fraction"] is None else f"  {row['read_bandwidth_fraction']:4.0%} of the read bandwidth{note}"
        click.echo(f"decode   {row['activations']:4s} batch {row['batch']:3d}, context {row['context']:4d}  {row['tokens_per_second']:9.1f} tokens/s{share}")
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
        times = result[key]
        if times is None:
            continue
        said = f"{name}, {times['activations']}, prompt of {times['prompt_tokens']} tokens"
        click.echo(f"{said:60s} {times['p50']:9.1f} ms (p99 {times['p99']:.1f})")
    _show_start(result["new_process"])
    recorded = result["environment"]["recorded_steps"]
    if recorded is not None:
        click.echo(f"decode steps of {', '.join(map(str, recorded['sizes']))} sequences recorded in {recorded['seconds']:.1f} s")
    bandwidth = result["environment"]["read_bandwidth"]
    read = "" if bandwidth is None else f", memory read at {bandwidth / 1e9:.1f} GB/s"
    click.echo(f"opened by this running process in {result['load_seconds']:.2f} s, peak memory {result['peak_rss_bytes'] / 2**20:.0f} MiB{read}")


def _show_start(start: dict[str, Any]) -> None:
    what = f"new process: start to first token, {start['activations']}"
    if start["first_token_ms"] is None:
        click.echo(f"{what}: not measured, it failed: {start['failed']}")
        return
    said = f"{what}, prompt of {start['prompt_tokens']} tokens"
    click.echo(f"{said:60s} {start['first_token_ms']:9.1f} ms")


def _peak_rss(meter: Meter) -> int:
    """Bytes; without what reading memory took."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sys.platform == "darwin" else max(meter.peaks.values())
