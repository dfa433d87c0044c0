"""`qforge generate`: continue prompts with the built-in runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qforge.cli import options
from qforge.cli.prompts import read_prompts
from qforge.errors import DataError, NotOnRuntimeError
from qforge.files import write_text
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN

if TYPE_CHECKING:
    from qforge.runtime.sequence import Output, SamplingParams

_TOLD = ("prompt", "prompt_token_ids", "token_ids", "text", "finish_reason")


@click.command(name="generate")
@click.argument("model")
@click.option("--prompt", "texts", metavar="TEXT", multiple=True, help="Continue this text; repeatable.")
@click.option(
    "--prompts", metavar="FILE", type=click.Path(path_type=Path), help='JSON Lines, one {"prompt": ...} or {"messages": [...]} a line; all run in one batch; - for stdin.'
)
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(min=1), help="Most new tokens for each prompt.")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), help="Sample the same tokens again; without it every run differs (unless greedy).")
@options.json_file("Write {outputs: [...]} to a file; - writes only JSON to stdout.")
@click.option("--activations", default="fp", show_default=True, type=click.Choice(ACTIVATIONS), help=ACTIVATIONS_MEAN)
@options.device
def command(
    model: str, texts: tuple[str, ...], prompts: Path | None, max_tokens: int, temperature: float, seed: int | None, json_file: str | None, activations: str,
    device: options.Device,
) -> None:  # fmt: skip
    """Continue prompts with MODEL: a directory, hub id, artifact, .gguf file, or demo."""
    if bool(texts) == (prompts is not None):
        raise DataError("give either --prompt TEXT or --prompts FILE.jsonl")
    given = list(texts) if prompts is None else read_prompts(prompts)
    from qforge.runtime import LLM, SamplingParams
    from qforge.runtime.running import most_sequences

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    most = None if device.name == "cpu" else min(len(given), most_sequences(device.name))  # a GPU records decode steps up to so many, which takes time
    try:
        llm = LLM(model, activations=activations, device=device.name, tensor_parallel=device.processes, max_num_seqs=most)
        outputs = llm.generate(given, params)
        beyond = llm.runner.spec.beyond if (activations, device.name, device.processes) == ("fp", "cpu", 1) else ""  # else nothing is to take over
        if beyond and any(o.finish_reason == "length" and len(o.token_ids) < max_tokens for o in outputs):
            raise NotOnRuntimeError(f"a continuation reaches the end of the context of {llm.max_context} tokens{beyond}")
    except NotOnRuntimeError as e:
        outputs = _on_transformers(e, model, given, params, activations, device)
    text = json.dumps({"outputs": [{name: getattr(o, name) for name in _TOLD} for o in outputs]}, ensure_ascii=False, indent=1)
    if json_file == "-":
        click.echo(text)
        return
    for number, output in enumerate(outputs, 1):
        if len(outputs) > 1:
            click.secho(f"--- {number}", dim=True)
        click.echo(output.text)
    if json_file is not None:
        write_text(Path(json_file), text + "\n")


def _on_transformers(why: NotOnRuntimeError, model: str, prompts: list[Any], params: SamplingParams, activations: str, device: options.Device) -> list[Output]:
    from qforge.engines.continuations import continuations
    from qforge.models.model import open_model
    from qforge.stages.evidence import only_runtime

    only_runtime("this runs on transformers", activations, device.name, device.processes)
    click.echo(f"{why}, in fp32", err=True)
    return continuations(open_model(model), prompts, params)
