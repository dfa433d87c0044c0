"""`qforge doctor`: what this machine has, and what it lacks."""

from __future__ import annotations

import json
from typing import Any

import click

from qforge.errors import MissingCapabilityError
from qforge.scheme import ACTIVATIONS


@click.command("doctor", help="Say what this machine has, and what it lacks and how to get it. Exit code 3 where a required package is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(as_json: bool) -> None:
    """Print a description of this machine; MissingCapabilityError where a required package is missing."""
    from qforge.cli.machine import describe_machine

    machine = describe_machine()
    click.echo(json.dumps(machine, indent=1) if as_json else report(machine))
    if not machine["ready"]:
        raise MissingCapabilityError(next(iter(machine["problems"])))


def report(machine: dict[str, Any]) -> str:
    """The description as text, in lines for a terminal."""
    cpu, memory, native = machine["cpu"], machine["memory"], machine["native"]
    limit = f", {_size(memory['limit_bytes'])} allowed in this container" if memory["limit_bytes"] else ""
    rows = [
        ("qforge", f"{machine['qforge_version']}, Python {machine['python']}, {machine['platform']}"),
        ("processor", f"{cpu['model']}, {cpu['cores']} cores ({' '.join(cpu['features']) or cpu['architecture']})"),
        ("memory", f"{_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} free{limit}"),
        ("disk", f"{_size(machine['disk']['free_bytes'])} free here"),
        ("GPU", "; ".join(f"{g['name']}, {_size(g['memory_bytes'])}, compute capability {g['compute_capability']}" for g in machine["gpus"]) or "none that torch can use"),
        ("native module", f"present, kernels for {', '.join(native['instruction_sets'])}" if native["present"] else "missing"),
    ]
    lines = [f"{name:<14} {text}" for name, text in rows] + ["", "kernels of the runtime, with --activations " + ", ".join(ACTIVATIONS)]
    if machine["kernels"]:  # there is torch
        from qforge.ops.select import short

        lines += [f"  {scheme:<20} {'; '.join(map(short, by.values()))}" for scheme, by in machine["kernels"].items()]
    lines += ["", "packages"]
    for package in machine["packages"]:
        lines.append(f"  {package['name']:<20} {package['version'] or 'missing':<14} {package['purpose']}" + ("" if package["version"] else f"; to get it: {package['get']}"))
    lines += ["", *(f"problem: {p}" for p in machine["problems"])] if machine["problems"] else ["", "everything that is required is here"]
    return "\n".join(lines)


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
