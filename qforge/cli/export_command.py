"""`qforge export`: write an artifact in another format, and check what was written."""

from __future__ import annotations

from pathlib import Path

import click

from qforge.cli import options


@click.command(
    "export", help="Write ARTIFACT in another format, read it back, and run it where an engine for it is at hand. In a run's folder it stays until the run is made again."
)
@click.argument("artifact")
@click.option("--format", "format_name", required=True, help="gguf, onnx, openvino, tensorrt, triton, trtllm, mlx, ascend, gptq, awq, compressed-tensors or bitsandbytes.")
@click.option("--type", "type_name", help="The format's own type, for example q4_0; the scheme decides unless given.")
@click.option("--out", type=options.FOLDER, help="Folder to write.")
def command(artifact: str, format_name: str, type_name: str | None, out: Path | None) -> int:
    """Write one export; the exit code, 1 where a check of it failed. A QforgeError says why it cannot be written or read back."""
    from qforge import pipeline
    from qforge.cli.output import print_export
    from qforge.cli.progress import TerminalProgress

    with TerminalProgress() as progress:
        result = pipeline.export(artifact, format_name, type=type_name, out=out, progress=progress)
    print_export(result)
    return 0 if all(v.passed for v in result.verified_by) else 1
