"""Workers through Ray: processes on this machine or, where RAY_ADDRESS names a cluster, on its machines. The model must be readable at the same path on each.

A cluster of our own ends with the run, leaves nothing behind, listens to nobody without its secret, and reports nothing to anybody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from qforge.calibration.room import Room
from qforge.calibration.shared import Part, Worker
from qforge.errors import MissingCapabilityError, ModelError, QforgeError, RecipeError
from qforge.models.blocks import BlockModel
from qforge.plan import Plan
from qforge.recipe import Recipe
from qforge.stages.journal import Journal, key, machine
from qforge.stages.meter import return_freed_memory
from qforge.stages.opening import open_models
from qforge.text.calibration import CalibrationSet

READY_S = 600  # until all workers have opened the model
LONGEST = 24  # of the path for temporary files: Ray's sockets lie 80 characters below it, and a socket's path has at most 107


def check(plan: Plan, calibration: CalibrationSet | None) -> None:
    """Refuse more workers than there are sequences.

    Raises:
        RecipeError: see above.
    """
    if calibration is not None and plan.workers > len(calibration.ids):
        raise RecipeError(f"run.workers: {plan.workers}, but the calibration text has {len(calibration.ids)} sequences, which they share; use at most as many workers")


@contextlib.contextmanager
def hired(recipe: Recipe, count: int, budget: int, journal: Journal, root: str) -> Iterator[list[Worker]]:
    """Workers that have opened the recipe's model, until the context is left.

    Args:
        recipe: names the model.
        count: of workers.
        budget: bytes of activations in memory, of all together.
        journal: keeps how many threads each has, since bits depend on it.
        root: of the quantization's keys.

    Raises:
        MissingCapabilityError: no cluster answers, or it has too little room.
        ModelError: another machine does not have the same model.
    """
    with _cluster(count) as here:
        import ray

        free = _threads(count)
        threads = _kept(journal, root, free)
        actors = [ray.remote(_Process).options(num_cpus=free, scheduling_strategy="SPREAD").remote() for _ in range(count)]
        recipe = recipe.at(recipe.folder.absolute(), recipe.name)
        opening = [actor.open.remote(recipe, threads, journal.folder.absolute(), budget // count, here) for actor in actors]
        if len(ray.wait(opening, num_returns=count, timeout=READY_S)[0]) < count:
            raise MissingCapabilityError(f"run.workers: {count} workers of {free} CPUs have not all started within {READY_S} s; is the Ray cluster busy with other work?")
        seen = [_fetched(found) for found in opening]
        _check_alike(seen, recipe)
        yield [_Hired(actor) for actor in actors]


class _Process:
    """A worker's process (a Ray actor)."""

    def open(self, recipe: Recipe, threads: int, folder: Path, budget: int, node: str) -> tuple[str, dict[str, Any]]:
        """Open the model. Returns the machine's address, and what decides the bits there; on another machine than `node` with the model's fingerprint."""
        import ray

        torch.set_num_threads(threads)
        return_freed_memory(sparing=recipe.run.memory_limit is not None)
        address, elsewhere = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id() != node
        try:
            model = open_models(recipe)[-1]
        except ModelError as e:
            raise ModelError(f"on the machine {address} of the Ray cluster, {e}") from e
        self._part = Part(BlockModel(model), Room(folder if folder.is_dir() else Path(tempfile.gettempdir()), budget))
        return address, machine() | ({"model": model.fingerprint()} if elsewhere else {})

    def call(self, task: str, *arguments: Any) -> Any:
        """See `Worker.start`."""
        return getattr(self._part, task)(*arguments)


class _Hired:
    """One of them (`Worker`)."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def start(self, task: str, *arguments: Any) -> Callable[[], Any]:
        """See `Worker.start`."""
        found = self._actor.call.remote(task, *arguments)
        return lambda: _fetched(found)


def _fetched(found: Any) -> Any:
    import ray

    try:
        return ray.get(found)
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, QforgeError):
            raise e.cause from None
        raise
    except ray.exceptions.RayError as e:
        said = " ".join(str(e).split())[:300]
        raise MissingCapabilityError(
            f"a worker has ended before its work was done, most often for want of memory; what is finished is kept: run the same command again to resume ({said})"
        ) from e


@contextlib.contextmanager
def _cluster(count: int) -> Iterator[str]:
    """Join the cluster of RAY_ADDRESS, or start one; yields the node where this process is."""
    address = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not address:  # Ray gives workers the lowest priority; it listens on all interfaces, and reads the secret once in a process
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    terminated = signal.getsignal(signal.SIGTERM)
    near = "/tmp" if len(tempfile.gettempdir()) > LONGEST else None
    with tempfile.TemporaryDirectory(prefix="qforge-", dir=near, ignore_cleanup_errors=True) as folder:
        try:
            if address:
                _check_answers(address)
                ray.init(address, **quiet)
            else:
                ray.init("local", num_cpus=max(count, torch.get_num_threads()), include_dashboard=False, _temp_dir=folder, **quiet)
        except (OSError, RuntimeError, ValueError) as e:
            tried = f"no Ray cluster answers at RAY_ADDRESS={address}" if address else "Ray does not start here"
            raise MissingCapabilityError(f"run.workers: {tried} ({' '.join(str(e).split())[:300]}); use workers: 1") from e
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)  # Ray has put its own in its place
            yield ray.get_runtime_context().get_node_id()
        finally:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _threads(count: int) -> int:
    """As many threads for each worker as the machines have room for."""
    import ray

    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fitting = [threads for threads in range(1, max(cpus, default=0) + 1) if sum(n // threads for n in cpus) >= count]
    if not fitting:
        raise MissingCapabilityError(f"run.workers: {count} needs a CPU for each worker, and the Ray cluster has {sum(cpus)}")
    return fitting[-1]


def _kept(journal: Journal, root: str, threads: int) -> int:
    """As many threads as the run began with, on whatever machines it is resumed."""
    name = key("workers", root=root)
    found = journal.load(name, count=False)
    if found is None:
        journal.save(name, {"done": torch.ones(1)}, {"threads": threads}, count=False)
        return threads
    return int(found[1]["threads"])


def _check_alike(seen: list[tuple[str, dict[str, Any]]], recipe: Recipe) -> None:
    """Refuse machines on which the same work would give other bits."""
    ours = machine()
    if any("model" in theirs for _, theirs in seen):
        ours["model"] = open_models(recipe)[-1].fingerprint()
    for address, theirs in seen:
        for name, value in theirs.items():
            if value != ours[name]:
                raise ModelError(f"the machine {address} of the Ray cluster differs from this one in its {name}: {value}, here {ours[name]}; all must have the same")
