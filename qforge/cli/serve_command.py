"""`qforge serve`: answer HTTP requests in OpenAI's shape with the built-in runtime."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import click

from qforge.cli import options
from qforge.errors import DataError, MissingCapabilityError
from qforge.files import LOCK
from qforge.scheme import ACTIVATIONS, ACTIVATIONS_MEAN

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")


@click.command(name="serve")
@click.argument("model")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 is every one of this machine. Where $QFORGE_API_KEY is set, clients of /v1 have to send it; else whoever reaches it may use it.",
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any that is free.")
@click.option("--activations", default="fp", show_default=True, type=click.Choice(ACTIVATIONS), help=ACTIVATIONS_MEAN)
@options.kv_cache
@options.device
def command(model: str, host: str, port: int, activations: str, kv_cache: str | None, device: options.Device) -> None:
    """Serve MODEL, under its name and the last part of it: POST /v1/completions and /v1/chat/completions, streamed or whole, GET /v1/models, /health and /metrics (Prometheus).
    Needs the extra [serve]."""
    lacking = [p for p in _PACKAGES if importlib.util.find_spec(p) is None]
    if lacking:
        raise MissingCapabilityError(f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed: pip install 'qforge[serve]'")
    from qforge.runtime import LLM
    from qforge.serve.starlette_app import Server
    from qforge.serve.uvicorn_server import bind, server_of

    called, key = _name(model), _key()
    with bind(host, port) as listens:  # where the address is taken, that is said before the model is loaded, which may take minutes
        llm = LLM(model, activations=activations, device=device.name, tensor_parallel=device.processes, kv_cache=kv_cache, prefix_cache=True)
        served = Server(llm, called, model, key=key)
        server = server_of(served.app, served.stop)
        listens.listen()  # who reads that it is served may ask at once
        address, number = listens.getsockname()[:2]
        click.echo(f"{called} is served on http://{f'[{address}]' if ':' in address else address}:{number}/v1", err=True)
        server.run(sockets=[listens])


def _key() -> bytes | None:
    """What clients have to send; of the environment, since others see a process's arguments."""
    key = os.environb.get(b"QFORGE_API_KEY")
    if key is not None and not (key and all(33 <= c < 127 for c in key)):
        raise DataError("QFORGE_API_KEY is empty, or has other characters than ASCII's printable ones without spaces; unset it for a server that asks for no key")
    return key


def _name(model: str) -> str:
    """What a model is called: the last part of its path, or its run's, in which it is `model`."""
    path = Path(model)
    if not path.exists():
        return path.name or model
    path = path.resolve()
    return path.parent.name if path.name == "model" and (path.parent / LOCK).exists() and path.parent.name else path.name
