"""The `qforge` command: finds the verb, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import reprlib
import sys
from typing import Any

import click

from qforge import __version__
from qforge.errors import QforgeError, RecipeError

# Threads of torch's that wait for work give their core away instead of spinning. On a machine that is busy otherwise GPTQ of a small model took 87 s spinning and 7.5 s so.
# They do so after some 50 us, as our own do: to be woken for every operation costs a tenth of tuning's time. OpenMP reads both when torch is imported, which every verb does later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "4000")
# Tensors of 2 MiB and more take huge pages, where the kernel lets a process ask for them: quantizing hands memory back at once (stages.meter), and a block of TinyLlama's shape
# spent 23 s of 100 in page faults, with huge pages 10 of 86. torch reads this with its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# What transformers thinks of a config (ids outside the vocabulary, names that it does not know) would stand before our one message.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VERBS = {
    "quantize": "merge, quantize, export, check and report, by recipe",
    "export": "write an artifact in another format",
    "eval": "perplexity of a model, and its divergence from another",
    "compare": "hold one result against another; exit 1 where it is worse",
    "generate": "continue prompts",
    "bench": "measure speed and memory",
    "serve": "answer HTTP requests in OpenAI's shape",
    "inspect": "say what a model file holds, and whether it is sound",
    "recipe": "validate a recipe, print its schema, write a first one",
    "doctor": "say what this machine has, and what it lacks",
}


class _Lazy(click.Group):
    """Imports a verb's module only when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [v for v in VERBS if importlib.util.find_spec(f"qforge.cli.{v}_command")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"qforge.cli.{name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(v, VERBS[v]) for v in self.list_commands(ctx)])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qforge")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Quantize a language model by recipe, export it everywhere, and prove that it is still good."""


def main(args: list[str] | None = None) -> Any:
    """Run the command line and exit with the contract's code: 0, 1 (a gate failed), 2 (bad input), 3 (something lacks), 130 (interrupted)."""
    args = sys.argv[1:] if args is None else args
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    try:
        sys.exit(cli.main(args=args, prog_name="qforge", standalone_mode=False) or 0)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; run the same command again to resume", err=True)
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except QforgeError as e:
        if debug:
            raise
        click.echo(f"error: {_shown(e)}", err=True)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as e:
        if debug or e.filename is None:
            raise
        click.echo(f"error: {e.strerror}: {reprlib.repr(e.filename)}", err=True)  # a path that is too long, a folder that may not be read, a disk that fails
        sys.exit(2)
    except Exception as e:
        if debug:
            raise
        click.echo(f"internal error: {type(e).__name__}: {e}\nThis is a defect of qforge; run again with --debug for the traceback.", err=True)
        sys.exit(70)
    except BaseException as e:
        if debug or type(e).__module__ != "pyo3_runtime":
            raise
        click.echo(f"error: a library that reads the model's files stopped ({_shown(e)}); they are damaged, or ask for what it does not know", err=True)  # a panic of Rust code
        sys.exit(2)


def _shown(e: BaseException) -> str:
    """A message as one line (a recipe's may have several), without what a terminal would obey."""
    text = str(e) if isinstance(e, RecipeError) else " ".join(str(e).split())
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
