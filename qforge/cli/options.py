"""Options that several verbs share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click


class Device(NamedTuple):
    """Where a model runs. `processes`: that share it."""

    name: str
    processes: int


def _read(context: click.Context, parameter: click.Parameter, value: str) -> Device:
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(cpu|cuda(?::\d+)?)", value)
    if match is None:
        raise click.BadParameter("give cpu, cuda or cuda:N, or 2xcuda to share the model between two GPUs", context, parameter)
    return Device(match[2], int(match[1] or 1))


device = click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", callback=_read,
    help="cpu, cuda or cuda:N (an NVIDIA GPU; needs the extra [gpu]); 2xcuda: shared between two GPUs, 2xcpu: between two processes.",
)  # fmt: skip

kv_cache = click.option(
    "--kv-cache", type=click.Choice(["fp32", "fp16", "bf16", "int8", "fp8"]),
    help="How keys and values are stored; fp32 equals the reference; bf16 is multiplied in bf16 too. On a GPU: fp16, int8, fp8. The default is fp8 where MODEL has scales for it, "
    "else fp32, on a GPU fp16.",
)  # fmt: skip


class _Folder(click.Path):
    """A folder; an empty name, as of a variable that is not set, is not the current one."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "":
            self.fail("its name is empty; . is the current folder", parameter, context)
        return super().convert(value, parameter, context)


FOLDER = _Folder(path_type=Path)


def _target(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != "-":
        path = Path(value).absolute()
        there = next(p for p in (path, *path.parents) if p.exists())
        problem = "is a folder: name a file" if path.is_dir() else "lies in no folder" if there != path and not there.is_dir() else None
        if problem is not None or not os.access(there, os.W_OK):
            raise click.BadParameter(f"{value} {problem or 'may not be written'}", context, parameter)
    return value


def json_file(what: str) -> Callable[[Any], Any]:
    """`--json FILE`, tried before anything is computed."""
    return click.option("--json", "json_file", metavar="FILE", callback=_target, help=what)
