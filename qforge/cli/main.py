"""The `qforge` command: finds the verb, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.util
import os
import reprlib
import sys
from collections.abc import Callable
from typing import Any

import click

from qforge import __version__
from qforge.errors import QforgeError, RecipeError
from qforge.files import is_full

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
    """Run the command line and exit with the contract's code: 0, 1 (a gate failed), 2 (bad input), 3 (something lacks), 70 (our defect), 130 (interrupted), 141 (no stdout)."""
    args = sys.argv[1:] if args is None else args
    debug, stdout = "--debug" in args, sys.stdout
    args = [a for a in args if a != "--debug"]
    try:
        try:
            code = cli.main(args=args, prog_name="qforge", standalone_mode=False) or 0
        except (SystemExit, click.exceptions.Exit) as e:
            code = e.code if isinstance(e, SystemExit) else e.exit_code
            if sys.stdout is not stdout:  # click wraps it where its reader has left, and ends with 1, which says that a gate failed
                code = 141
        sys.stdout.flush()  # what is still held back may find no room
    except BrokenPipeError:
        code = 141
    except BaseException as e:
        if debug and not isinstance(e, (click.Abort, KeyboardInterrupt, click.ClickException)):
            raise
        code, show = _told(e, "quantize" in args[:1])
        with contextlib.suppress(OSError):
            show()
    _give_up_what_stdout_does_not_take()
    sys.exit(code)


def _told(e: BaseException, resumes: bool) -> tuple[int, Callable[[], None]]:
    """The exit code of what went wrong, and what says so on stderr. `resumes`: whether the verb goes on where it was stopped."""
    if isinstance(e, click.ClickException):
        return 2, e.show
    if isinstance(e, (click.Abort, KeyboardInterrupt)):
        code, text = 130, "interrupted" + "; run the same command again to resume" * resumes
    elif isinstance(e, QforgeError):
        code, text = e.exit_code, f"error: {_shown(e)}"
    elif isinstance(e, OSError) and e.filename is not None:  # a path that is too long, a folder that may not be read, a disk that fails
        code, text = 2, f"error: {e.strerror}: {reprlib.repr(e.filename)}"
    elif isinstance(e, OSError) and (is_full(e) or e.errno in (errno.EIO, errno.EFBIG)):  # a write, which names no file
        code, text = 2, f"error: {e.strerror or e}: what goes to stdout, or to a file, is not whole; make room and run again"
    elif type(e).__module__ == "pyo3_runtime":  # a panic of Rust code
        code, text = 2, f"error: a library that reads the model's files stopped ({_shown(e)}); they are damaged, or ask for what it does not know"
    elif isinstance(e, Exception):
        code, text = 70, f"internal error: {type(e).__name__}: {e}\nThis is a defect of qforge; run again with --debug for the traceback."
    else:
        raise e
    return code, functools.partial(click.echo, text, err=True)


def _give_up_what_stdout_does_not_take() -> None:
    """Python would try once more when it ends, and then end with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown(e: BaseException) -> str:
    """A message as one line (a recipe's may have several), without what a terminal would obey."""
    text = str(e) if isinstance(e, RecipeError) else " ".join(str(e).split())
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
