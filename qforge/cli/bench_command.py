"""`qforge bench`: how fast a model runs on the built-in runtime, and how much memory it takes."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import click

from qforge.files import write_text


@click.command(name="bench")
@click.argument("model")
@click.option("--activations", type=click.Choice(["fp", "int8"]), help="fp is accurate; int8 rounds activations on the fly (faster). Both are measured unless one is given.")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures to a file; - writes only JSON to stdout.")
def command(model: str, activations: str | None, json_path: str | None) -> None:
    """Measure MODEL: prefill and decode speed, time to first token, time per token, memory, loading time."""
    from qforge.ops.native import default_threads, instruction_sets
    from qforge.runtime import LLM
    from qforge.runtime.bench import measure, with_speed
    from qforge.stages.outcome import environment

    start = time.perf_counter()
    llm = LLM(model, activations=activations or "fp")
    loaded = time.perf_counter() - start
    figures = measure(llm, activations or "fp")
    machine = environment() | {"threads": default_threads(), "instruction_set": next(iter(instruction_sets()), None), "kernels": llm.kernels()}
    if activations is None and any("native-a16" in name for name in llm.kernels()):
        del llm  # its memory
        figures = with_speed(figures, measure(LLM(model, activations="int8"), "int8"))
    result = {"environment": machine, **figures, "peak_rss_bytes": _peak_rss(), "load_seconds": loaded}
    text = json.dumps(result, indent=1)
    if json_path == "-":
        click.echo(text)
    else:
        if json_path is not None:
            write_text(Path(json_path), text + "\n")
        _show(result)


def _show(result: dict[str, Any]) -> None:
    for row in result["prefill"]:
        click.echo(f"prefill  {row['tokens']:4d} tokens                {row['tokens_per_second']:9.1f} tokens/s  {row['activations']}")
    for row in result["decode"]:
        click.echo(f"decode   batch {row['batch']:3d}, context {row['context']:4d}   {row['tokens_per_second']:9.1f} tokens/s  {row['activations']}")
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "each further token")):
        click.echo(f"{name:31s} {result[key]['p50']:9.1f} ms (p99 {result[key]['p99']:.1f})")
    click.echo(f"loaded in {result['load_seconds']:.1f} s, peak memory {result['peak_rss_bytes'] / 2**20:.0f} MiB")


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
