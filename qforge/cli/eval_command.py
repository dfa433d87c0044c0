"""`qforge eval`: perplexity of a model, and its divergence from another."""

from __future__ import annotations

import click

from qforge.cli import options
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN

ENGINES = ("auto", "runtime", "transformers", "llama.cpp", "onnxruntime", "tensorrt")


@click.command("eval", help="Perplexity of MODEL on a text and, with --against, its divergence from another model.")
@click.argument("model")
@click.option("--against", metavar="MODEL", help="The reference model.")
@click.option("--text", default="builtin", show_default=True, help="builtin, a .txt or .jsonl file, or a hub data set.")
@click.option("--window", type=click.IntRange(min=2), default=2048, show_default=True, help="Tokens in a window; capped at the model's context.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="auto",
    show_default=True,
    help="What computes MODEL's figures; llama.cpp takes a .gguf file, onnxruntime the folder of an ONNX export, tensorrt that of a TensorRT export (on its GPU).",
)
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="fp", show_default=True, help=ACTIVATIONS_MEAN)
@options.json_file("Write the evaluation as JSON; - for stdout.")
@options.device
def command(model: str, against: str | None, text: str, window: int, engine: str, activations: str, json_file: str | None, device: options.Device) -> None:
    """Print an evaluation, and write it as JSON if asked to. A QforgeError says what cannot be read, compared or run here."""
    import json
    from dataclasses import asdict

    from qforge import pipeline
    from qforge.cli.output import print_evaluation, write_json
    from qforge.cli.progress import TerminalProgress

    with TerminalProgress() as progress:
        evaluation = pipeline.evaluate(
            model, against=against, text=text, window=window, engine=engine, activations=activations, device=device.name, tensor_parallel=device.processes, progress=progress
        )
    print_evaluation(evaluation, to_stderr=json_file == "-")
    if json_file is not None:
        write_json(json_file, json.dumps(asdict(evaluation), indent=1, allow_nan=False) + "\n")
