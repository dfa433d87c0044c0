"""Options that several verbs share."""

from __future__ import annotations

import re
from typing import NamedTuple

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
