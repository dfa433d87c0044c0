"""`qforge inspect`: say what a model file holds, and whether it is sound."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(
    "inspect", help="Say what PATH (a model directory, an artifact, the folder of a run or of an export, a .gguf file) holds, and whether it is sound. Exit code 2 where it is not."
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, every layer included.")
@click.option(
    "--check",
    is_flag=True,
    help="Read every tensor, too (finite numbers, codes and scales that fit), and open ONNX and OpenVINO files in their engines where installed.",
)
def command(path: Path, as_json: bool, check: bool) -> None:
    """Print what a model file holds; ModelError where it is not sound."""
    from qforge.export.inspection import inspect, summary

    found = inspect(path, check=check)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(summary(found)))
