"""`qforge bench MODEL --tune`: time tiles for a model's products on the GPU of this machine, and keep the fastest."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from qforge.cli.output import write_json
from qforge.errors import MissingCapabilityError, UnsupportedError

if TYPE_CHECKING:
    from qforge.ops.triton.tuned import Tuned


def tune_tiles(model: str, json_path: str | None) -> None:
    """Write the table of this device; `json_path`: what was found, too.

    Raises:
        MissingCapabilityError: no NVIDIA GPU, or no Triton.
        UnsupportedError: the model has no product for which a tile is chosen.
    """
    from qforge.ops.triton.present import interpreted, missing

    reason = "Triton's interpreter has no times" if interpreted() else missing("cuda")
    if reason is not None:
        raise MissingCapabilityError(f"bench --tune times kernels on an NVIDIA GPU: {reason}; without a table of its own, a GPU runs the shipped tiles")
    import torch
    import triton

    from qforge.models.model import open_model
    from qforge.ops.triton import tuned
    from qforge.ops.triton.present import capability
    from qforge.ops.triton.tune import gpu_timer, products_of, tune

    opened = open_model(model)
    products = products_of(opened.spec, opened.schemes) if opened.spec is not None and opened.spec.experts is None else []
    if not products:
        raise UnsupportedError(f"'{model}' has no layers for the GPU's kernels (4-bit weights, or 8-bit weights and activations): there is nothing to tune")
    name = torch.cuda.get_device_name()
    found = tune(products, capability(torch.device("cuda")), gpu_timer, _say)
    facts = {"device": name, "triton": triton.__version__, "torch": torch.__version__, "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}
    path = tuned.path_of(name, triton.__version__)
    tuned.write(path, found, facts)
    if json_path is not None:
        write_json(json_path, json.dumps({**facts, "tiles": [asdict(t) for t in found]}, indent=1) + "\n")
    click.echo(f"kept in {path}", err=True)


def _say(t: Tuned) -> None:
    p, tile = t.product, t.tile
    shape = f"{p.kernel} {p.outputs} x {p.inputs}{f' g{p.group}' if p.group else ''}"
    found = f"{t.rows:3d} rows  {t.microseconds:8.1f} us  ({t.shipped_microseconds / t.microseconds:.2f} x the shipped tile)"
    click.echo(f"{shape:32s} {found}  {tile.m} x {tile.n} x {tile.k}, {tile.warps} warps, {tile.stages} stages, {tile.parts} parts", err=True)
